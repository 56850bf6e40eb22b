"""Build, check and tag a release. Uploads nothing: it ends with the command that would.

    python scripts/release.py all --repository https://host/owner/creel

or, step by step, `date`, `check`, `build --repository ...` and `tag`.

`date` commits the date of this version, and pages that no longer say that nothing was released.
`check` says what stands in the way: changes that are not committed, a CHANGELOG without this
version, a tag that exists, a page that says nothing was released, states that are not recorded.
`build` checks the same, makes dist/*.whl and dist/*.tar.gz of the last commit, opens them, trains
with the wheel in a new environment, and writes dist/SHA256SUMS. No file of the repository says
where it lies, so `build` is told, and writes it into the package's links and into those of README,
which an index shows. The tag has this version's changes and the sums; where git has a key
(`user.signingkey`), it is signed. `make test` comes before, in CI.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from datetime import datetime, timezone
from email.parser import HeaderParser
from pathlib import Path

ROOT = Path(__file__).parents[1]
VERSION = re.findall(
    r'^VERSION = "(.+)"', (ROOT / "src/creel/version.py").read_text(), re.MULTILINE
)[0]
TAG = f"v{VERSION}"
_LINK = re.compile(r"\]\((?!https?://|#)([^)\s]+)\)")  # a link within the repository
_NEEDED = ("py.typed", "deploy/creeld.service", "deploy/slurm/prolog.sh", "examples/train.py")
_UNRELEASED = "Nothing has been released yet"  # said on pages until the first release
PAGES = ("CHANGELOG.md", "README.md", "docs/start.md")
_BUILD = (
    "import sys; from setuptools import build_meta as b; out = sys.argv[1];"
    " b.build_sdist(out); b.build_wheel(out)"
)
#: Trains with what is installed: files that a daemon serves, and torch's batches of the same files.
_TRAINING = """
import pathlib, sys, torch, creel
assert pathlib.Path(creel.__file__).is_relative_to(sys.prefix), creel.__file__
paths = [pathlib.Path(f"{i}.bin") for i in range(32)]
for i, path in enumerate(paths):
    path.write_bytes(bytes([i, i]))
read = lambda data: torch.frombuffer(bytearray(data), dtype=torch.uint8)
ours = creel.DataLoader(
    creel.FileDataset(paths, decode=read), 4, shuffle=True, creel={"loader.direct": "never"}
)
theirs = torch.utils.data.DataLoader([read(path.read_bytes()) for path in paths], 4, shuffle=True)
seen = []
for loader in (ours, theirs):
    torch.manual_seed(1)
    seen.append([batch.tolist() for _ in range(2) for batch in loader])
assert seen[0] == seen[1], "other batches than torch's"
assert ours.stats()["direct_reads"] == 0, "no daemon served them"
print("trained with creel", creel.__version__)
"""


def check() -> list[str]:
    """Return what stands in the way of a release of the last commit."""
    faults = []
    if _git("status", "--porcelain"):
        faults.append("there are changes that are not committed")
    if not re.search(rf"^## {re.escape(VERSION)} - \d{{4}}-", _changelog(), re.MULTILINE):
        faults.append(f"CHANGELOG.md has no heading '## {VERSION} - YYYY-MM-DD'")
    if _git("tag", "--list", TAG):
        faults.append(f"the tag {TAG} exists: raise VERSION in src/creel/version.py")
    pages = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    if not (ROOT / f"tests/unit/top/states/{VERSION}.json").exists():
        faults.append(
            "the states of this release are not recorded: tests/unit/top/test_older_states.py"
        )
    stale = [page for page in pages if _UNRELEASED in page.read_text()]
    return faults + [f"{page.relative_to(ROOT)} says: {_UNRELEASED}" for page in stale]


def released(text: str, day: str) -> str:
    """Return a page of the first release: no longer of a clone in which nothing was released.

    >>> released("## Unreleased", "2026-12-01")
    '## 0.1.0 - 2026-12-01'
    """
    text = re.sub(r"^## Unreleased$", f"## {VERSION} - {day}", text, flags=re.MULTILINE)
    text = text.replace(f"{_UNRELEASED}: in a clone of the repository, on", "On")
    text = text.replace("pip install '.[torch,images]'", "pip install 'creel-data[torch,images]'")
    return re.sub(rf"{_UNRELEASED}[^.]*\.\s+", "", text)


def date() -> None:
    """Commit what the pages say of this release from now on, if they do not say so yet."""
    _require(not _git("status", "--porcelain"), "there are changes that are not committed")
    for path in (ROOT / name for name in PAGES):
        path.write_text(
            released(path.read_text(), datetime.now(tz=timezone.utc).date().isoformat())
        )
    if _git("status", "--porcelain"):
        _git("commit", "--all", "-m", f"creel {VERSION}")


def prepare(tree: Path, repository: str) -> None:
    """Write the address of the repository into a copy of it: the package's and README's links."""
    readme = tree / "README.md"
    readme.write_text(absolute(readme.read_text(), f"{repository}/blob/{TAG}"))
    urls = {
        "Homepage": repository,
        "Changelog": f"{repository}/blob/{TAG}/CHANGELOG.md",
        "Documentation": f"{repository}/tree/{TAG}/docs",
        "Issues": f"{repository}/issues",
    }
    lines = "".join(f'{name} = "{url}"\n' for name, url in urls.items())
    with (tree / "pyproject.toml").open("a") as f:
        f.write(f"\n[project.urls]\n{lines}")


def absolute(text: str, base: str) -> str:
    """Return Markdown whose links within the repository begin with `base`.

    >>> absolute("[a](docs/a.md#b) [c](#c) [d](https://d)", "https://x")
    '[a](https://x/docs/a.md#b) [c](#c) [d](https://d)'
    """
    return _LINK.sub(rf"]({base}/\1)", text)


def build(tree: Path, out: Path) -> list[Path]:
    """Build sdist and wheel of a tree, check both, and return them.

    The sdist is built again: what it lacks is missing in the wheel that comes of it.
    """
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("creel_data-*"):
        old.unlink()
    _build(tree, out)
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(sdist) as opened:
            opened.extractall(folder, filter="data")
        (inner,) = Path(folder).iterdir()
        _build(inner, Path(folder) / "again")
        (again,) = Path(folder).glob("again/*.whl")
        _require(_names(again) == _names(wheel), "the sdist lacks files that the wheel has")
    _look_into(wheel)
    sums = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}" for path in (wheel, sdist)
    ]
    (out / "SHA256SUMS").write_text("\n".join(sums) + "\n")
    return [wheel, sdist]


def try_out(wheel: Path) -> str:
    """Train with the wheel in a new environment; return what `_TRAINING` says.

    What the wheel needs is seen in this interpreter's packages.
    """
    with tempfile.TemporaryDirectory() as folder:
        environment = Path(folder, "environment")
        venv.create(environment, symlinks=True)
        _run(
            sys.executable,
            "-m",
            "pip",
            "-q",
            "--disable-pip-version-check",
            "--python",
            str(environment),
            "install",
            "--no-deps",
            "--no-index",
            str(wheel),
        )
        (packages,) = environment.glob("lib/python*/site-packages")
        seen = [path for path in sys.path if path.endswith("site-packages")]
        (packages / "needs.pth").write_text("\n".join(seen) + "\n")
        return _run(
            str(environment / "bin/python"),
            "-c",
            _TRAINING,
            cwd=folder,
            CREEL_SOCKET=f"release-{os.getpid()}",
        )


def _run(*command: str, cwd: str | Path | None = None, **variables: str) -> str:
    env = os.environ | variables
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    _require(done.returncode == 0, f"{command[0]} failed:\n{done.stderr}")
    return done.stdout.strip()


def _build(tree: Path, out: Path) -> None:
    out.mkdir(exist_ok=True)
    _run(sys.executable, "-c", _BUILD, str(out.resolve()), cwd=tree)


def _look_into(wheel: Path) -> None:
    names = _names(wheel)
    missing = [name for name in _NEEDED if f"creel/{name}" not in names]
    _require(not missing, f"the wheel has no {', '.join(missing)}")
    strange = [name for name in names if not name.startswith(("creel/", "creel_data-"))]
    _require(not strange, f"the wheel has {', '.join(strange)}")
    with zipfile.ZipFile(wheel) as opened:
        text = opened.read(f"creel_data-{VERSION}.dist-info/METADATA").decode()
    metadata = HeaderParser().parsestr(text)
    _require(
        (metadata["Name"], metadata["Version"]) == ("creel-data", VERSION),
        "another name or version",
    )
    _require(
        not _LINK.search(str(metadata.get_payload())),
        "README has links that an index cannot follow",
    )


def _names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as opened:
        return set(opened.namelist())


def tag(out: Path) -> None:
    """Tag the last commit, with what CHANGELOG says of this version, and what was built of it."""
    _, _, section = _changelog().partition(f"## {VERSION} - ")
    text = section.partition("\n")[2].partition("\n## ")[0].strip()
    if (sums := out / "SHA256SUMS").exists():
        text += f"\n\nsha256:\n{sums.read_text()}"
    signed = ["--sign"] if _git("config", "--default", "", "--get", "user.signingkey") else []
    message = f"creel {VERSION}\n\n{text}"
    _git("tag", "--annotate", *signed, "--cleanup=verbatim", "-m", message, TAG)


def _changelog() -> str:
    return (ROOT / "CHANGELOG.md").read_text()


def _git(*words: str) -> str:
    command = ["git", "-C", str(ROOT), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _require(good: bool, otherwise: str) -> None:
    if not good:
        raise SystemExit(f"release: {otherwise}")


def _check() -> None:
    faults = check()
    _require(not faults, "; ".join(faults))


def _export(folder: str) -> Path:
    """Return a folder with the files of the last commit."""
    archive = subprocess.run(
        ["git", "-C", str(ROOT), "archive", "HEAD"], check=True, capture_output=True
    )
    subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
    return Path(folder)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["date", "check", "build", "tag", "all"])
    parser.add_argument("--repository", help="address of the repository, for `build` and `all`")
    parser.add_argument("--tree", type=Path, help="a copy to build, instead of the last commit")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    args = parser.parse_args()
    if args.what in {"date", "all"}:
        date()
    if args.what != "date" and (args.tree is None or args.what != "build"):
        _check()
    if args.what in {"build", "all"}:
        _build_all(args.repository, args.tree, args.out)
    if args.what in {"tag", "all"}:
        tag(args.out)
        print(f"tagged {TAG}; publish it: git push origin {TAG}")
        print(f"upload it: twine upload {args.out}/creel_data-{VERSION}*")


def _build_all(repository: str | None, given: Path | None, out: Path) -> None:
    _require(bool(repository), "--repository is missing: where does the source lie?")
    # `prepare` writes into the tree: never into somebody's clone.
    _require(
        given is None or not (given / ".git").exists(),
        f"{given} is a clone: give a copy without .git",
    )
    with tempfile.TemporaryDirectory() as folder:
        tree = given or _export(folder)
        prepare(tree, str(repository).rstrip("/"))
        wheel, sdist = build(tree, out)
    print(f"built {wheel}\nbuilt {sdist}\n{try_out(wheel)}")


if __name__ == "__main__":
    main()
