from dataclasses import replace

from hf_posenc.facts import Facts
from hf_posenc.registry import register_scheme
from hf_posenc.scheme import Scheme


@register_scheme("nope", paper="2305.19466", family="absolute", usual=True)
class NoPE(Scheme):
    """No positional encoding: a causal mask alone lets a decoder learn positions (Kazemnejad et al. 2023).

    An encoder without any encoding sees a bag of words; `plan` warns about that. The softmax scale stays the model's
    own.
    """

    neutral_options = {}

    def facts(self, *, native_kept: bool = False, element: int = 4) -> Facts:
        found = super().facts(native_kept=native_kept, element=element)
        if native_kept or self.geometry.causal:
            return found
        caution = (
            "Without any encoding, attention to both sides sees a bag of words: it cannot tell orders of tokens apart."
        )
        return replace(found, cautions=(caution,))

    def is_silent(self) -> bool:
        return True
