"""The text of random programs that copy, change, derive and read wrapped datasets."""

from __future__ import annotations

import random
from typing import Any

HEADER = """\
import copy
import torch
from torch.utils.data import *
import creel
from stress.userland import *
from stress.wrapped_userland import *
"""
KINDS = (
    *("Plain", "Derived", "Derived", "Batches", "Slots", "Data", "Frozen", "Concrete"),
    *("Delegating", "Closing", "Reduced"),
)
#: Ways to another dataset of the same class, whose state is its own.
COPIES = ("copy.copy({d})", "copy.deepcopy({d})", "pickled({d})", "{d}[1:7]", "{d}.scaled({k})")
MADE = ("{d}.again({k})", "{d}.of_type({k})")
AROUND = (
    "Subset({d}, {some})",
    "ConcatDataset([{d}, {e}])",
    "StackDataset({d}, {d})",
    "random_split({d}, [2, len({d}) - 2], torch.Generator().manual_seed({k}))[1]",
    "ConcatDataset([Subset({d}, {some}), {e}])",
)
CHANGES = (
    "{d}.scale = {k}",
    "{d}.transform = minus",
    "{d}.transform = None",
    "{d}.transform = with_noise",
    "{d}.paths = {d}.paths[::-1]",
    "{d}.paths[0] = {d}.paths[-1]",
    "setattr({d}, 'paths', {d}.paths[:8])",
    "vars({d})['scale'] = {k}",
    "Files.bias = {k}",
)
PLAIN_CHANGES = ("{d}.turn()", "{d} = {d}.turn()", "{d}.hold()")
USES = (
    *("about({d})", "walked({d})", "{d}[{i}]", "{d}[-1]", "len({d}[2:5])", "list({d})[:2]"),
    *("{d}[99]", "{d}(3)", "{d}.paths[0] in {d}", "{d}.nothing", "{d}['key']", "iter({d})"),
    *("{d} == copy.deepcopy({d})", "hash({d}) == hash(copy.copy({d}))", "[x for x in {d}][1]"),
    *("[{d}.sample(b'abc'), sizes({d}.paths)]", "len({d} + {d})", "({d} + {d})[{i}]"),
)
OPTIONS = (None, None, {"loader.direct": "never"}, {"loader.direct": "auto"}, False)


class WrappedProgram:
    """Draws one program; `text` is the result."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._lines: list[str] = []
        self._names = 0
        #: Variables of datasets by the class of these; "" for one of torch's around others.
        self._kinds: dict[str, str] = {}
        daemon = self._of("large", "large", "small", "none")
        self._say(f"begin({seed}, {daemon!r}, {self._of('never', 'auto')!r})")
        sizes = self._of("[700] * 12", "range(5000, 5012)", "[70_000] * 12")
        self._say(f"files = make_files('files', {sizes})")
        self._leaf()
        for _ in range(self._of(6, 12, 20)):
            self._of(*self._steps())()
        self._epochs(self._any())
        self.text = HEADER + "\n".join(self._lines) + "\n"

    def _steps(self) -> list[Any]:
        return [
            *(self._leaf, self._wrap, self._wrap, self._copy, self._copy, self._around),
            *(self._change, self._change, self._change, self._use, self._use, self._use),
            *(self._drop, self._epochs_of_any),
        ]

    def _of(self, *choices: Any) -> Any:
        return self._random.choice(choices)

    def _say(self, line: str) -> None:
        self._lines.append(line)

    def _any(self, *, own: bool = False) -> str:
        """Return a dataset's variable; `own`: not one of torch's around others."""
        name: str = self._of(*(name for name, kind in self._kinds.items() if kind or not own))
        return name

    def _fill(self, template: str, d: str) -> str:
        numbers: dict[str, Any] = {
            "k": self._random.randrange(2, 100),
            "i": self._random.randrange(4),
            "some": [self._random.randrange(4) for _ in range(5)],
        }
        return template.format(d=d, e=self._any(), **numbers)

    def _assign(self, expression: str, kind: str) -> None:
        self._names += 1
        name = f"d{self._names}"
        # A step may fail, under both loaders in the same way: the variable is then another's.
        self._say(f"{name} = made(lambda: {expression}, {self._any() if self._kinds else None})")
        self._kinds[name] = kind

    def _leaf(self) -> None:
        kind = self._of(*KINDS)
        self._assign(f"{kind}(files, {self._random.randrange(1, 9)})", kind)

    def _wrap(self) -> None:
        name = self._any()
        self._assign(f"wrap({name})", self._kinds[name])

    def _copy(self) -> None:
        name = self._any(own=True)
        self._assign(self._fill(self._of(*COPIES, *MADE), name), self._kinds[name])

    def _around(self) -> None:
        self._assign(self._fill(self._of(*AROUND), self._any()), "")

    def _change(self) -> None:
        name = self._any(own=True)
        plain = self._kinds[name] not in {"Slots", "Data", "Frozen", "Delegating"}
        line = self._fill(self._of(*CHANGES, *PLAIN_CHANGES * plain), name)
        self._say(f"try: {line}\nexcept Exception as e: shown.append(('change', error(e)))")

    def _use(self) -> None:
        use = self._fill(self._of(*USES), self._any(own=self._random.random() < 0.8))
        self._say(f"show({use!r}, lambda: {use})")

    def _drop(self) -> None:
        """Forget a dataset; its wrapped one, or the one that it wraps, may live on."""
        if len(self._kinds) > 3 and sum(map(bool, self._kinds.values())) > 1:
            name = self._any(own=True)
            del self._kinds[name]
            self._say(f"del {name}")

    def _epochs_of_any(self) -> None:
        self._epochs(self._any())

    def _epochs(self, name: str) -> None:
        kind = self._of("Loader", "Loader", "TorchLoader")
        workers = self._of(0, 0, 0, 1, 2)
        more = ", persistent_workers=True" if workers and self._of(True, False) else ""
        more += ", shuffle=True" if self._of(True, False) else ""
        options = self._of(*OPTIONS)
        self._say(
            f"loader = {kind}({name}, batch_size={self._of(1, 3, 5)}, num_workers={workers}, "
            f"collate_fn=as_list, options={options}{more})"
        )
        for number in range(self._of(1, 2, 3)):
            if number and not more.startswith(", persistent"):
                self._change()
            self._say("epoch(loader)")
