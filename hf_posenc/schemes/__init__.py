"""One file per scheme; the registry imports every module here. `families` holds what several schemes share.

The package is also the public function `hf_posenc.schemes()`: importing a package binds its name on the parent, so both
must be one object.
"""

import sys
from types import ModuleType

from hf_posenc import registry


class _CallablePackage(ModuleType):
    __call__ = staticmethod(registry.schemes)


sys.modules[__name__].__class__ = _CallablePackage
