"""Build the distributions and compare what is in them with the tree; install the wheel elsewhere and use it.

An editable install works for a script next to the clone, too, where the clone is in a folder named as the package.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def expected() -> set[str]:
    """Return the files that an installation must have, relative to site-packages."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    found = set()
    for name in tracked:
        folder = name.split("/")[0]
        if folder == "hf_posenc" and not (ROOT / name).is_symlink():
            found.add(name)
        elif folder in ("patches", "recipes"):
            found.add(f"hf_posenc/{name}")
    return found


def check_editable(folder: Path) -> None:
    """Install a copy of the tree in a folder named `hf_posenc`, and use it next to that folder."""
    clone, site = folder / "hf_posenc", folder / "site"
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    for name in tracked:
        if not name.startswith(("tests/", "docs/", "benchmarks/")):
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, clone / name, follow_symlinks=False)
    build = f"from setuptools import build_meta; build_meta.build_editable({str(folder)!r})"
    subprocess.run([sys.executable, "-c", build], check=True, cwd=clone, stdout=subprocess.DEVNULL)
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(site)
    script = folder / "script.py"
    script.write_text(
        f"import site; site.addsitedir({str(site)!r})\nimport hf_posenc\n"
        f"assert hf_posenc.__file__.startswith({str(clone)!r}), hf_posenc.__file__\n",
        encoding="utf-8",
    )
    # Without site-packages, where another copy of the package may be installed.
    subprocess.run([sys.executable, "-S", str(script)], check=True, cwd=folder)


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary)
        subprocess.run(
            [sys.executable, "-m", "build", "--outdir", str(out), str(ROOT)], check=True, stdout=subprocess.DEVNULL
        )
        (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
        packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
        if packed != expected():
            sys.exit(f"wheel: missing {sorted(expected() - packed)}, unexpected {sorted(packed - expected())}")
        with tarfile.open(sdist) as archive:
            links = [member.name for member in archive.getmembers() if member.issym() or member.islnk()]
        if links:
            sys.exit(f"sdist: holds links {links}")
        target = out / "site"
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), str(wheel)]
        subprocess.run(install, check=True)
        code = (
            f"import sys; sys.path.insert(0, {str(target)!r}); import hf_posenc, hf_posenc.patches.llama, "
            "hf_posenc.recipes.data.text; "
            f"assert hf_posenc.__file__.startswith({str(target)!r}), hf_posenc.__file__; "
            "print(len(hf_posenc.schemes()))"
        )
        subprocess.run([sys.executable, "-c", code], check=True, cwd=out, stdout=subprocess.DEVNULL)
        (out / "editable").mkdir()
        check_editable(out / "editable")
    sys.stdout.write(f"package: {len(packed)} files, as in the tree\n")


if __name__ == "__main__":
    main()
