"""creel's loader under `transformers.Trainer`, without a change to transformers.

from creel.integrations.transformers import Trainer  # in place of transformers' own
"""

from __future__ import annotations

from typing import Any

import transformers

from creel.integrations.accelerate import served


class CreelLoaders:
    """Mixin for a `transformers.Trainer`, or a subclass (`SFTTrainer`): its loaders are creel's.

    To stand before the class: `class MyTrainer(CreelLoaders, SFTTrainer): ...`. Batches are those
    that the class gives with torch's loader. A training that is resumed in mid-epoch ends that
    epoch with a loader of torch's, which transformers makes by itself.
    """

    def get_train_dataloader(self) -> Any:
        return served(super().get_train_dataloader())  # type: ignore[misc]

    def get_eval_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        return served(super().get_eval_dataloader(*args, **kwargs))  # type: ignore[misc]

    def get_test_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        return served(super().get_test_dataloader(*args, **kwargs))  # type: ignore[misc]


class Trainer(CreelLoaders, transformers.Trainer):  # type: ignore[misc]  # an optional package
    """`transformers.Trainer` whose loaders are creel's."""
