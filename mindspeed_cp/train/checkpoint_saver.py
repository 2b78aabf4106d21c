"""When checkpoints are written: at once, or in the background while the next steps are trained."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from mindspeed_cp.config.settings import Settings
from mindspeed_cp.train import optimizer_state
from mindspeed_cp.train.checkpoint import BegunSave, begin_save, remove_hidden, save
from mindspeed_cp.train.checkpoint_writer import Copies
from mindspeed_cp.train.model import TrainingModel
from mindspeed_cp.train.progress import Progress
from mindspeed_cp.train.run_files import RunFiles
from mindspeed_cp.train.world import World


class CheckpointSaver:
    """Saves checkpoints, never two at once; every rank calls every method, between steps.

    With checkpoint.async_save a thread copies this rank's shards during the forward and backward of the next step,
    whose update waits for it, and writes the copies. A checkpoint gets its name at a boundary of steps by which the
    threads of all ranks are done.

    Attributes:
        newest: folder of the newest complete checkpoint that is not one of a spike, or None.
    """

    def __init__(
        self, files: RunFiles, training: TrainingModel, settings: Settings, world: World, newest: Path | None
    ) -> None:
        self._files, self._training, self._settings, self._world = files, training, settings, world
        self.newest = newest
        self._copies: Copies = {}
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._begun: BegunSave | None = None
        self._written: Future[None] | None = None
        self._removed: Future[None] | None = None
        if settings.checkpoint.async_save:
            for optimizer in optimizer_state.torch_optimizers(training.optimizer):
                optimizer.register_step_pre_hook(lambda *_: self._wait_for_copy())

    def save(self, progress: Progress) -> None:
        """Save a checkpoint after a step; where the one before is not complete, wait for it.

        Raises:
            DiskError: this one or the one before cannot be written.
        """
        if not self._settings.checkpoint.async_save:
            folder = save(self._files, self._training, progress, self._settings, self._world)
            self.newest = self.newest if progress.spike else folder
            return
        self.finish()
        self._begun = begin_save(self._files, self._training, progress, self._settings, self._world, self._copies)
        self._written = self._thread.submit(self._copy_and_write, self._begun)

    def finish_if_written(self) -> None:
        """Complete the checkpoint if all ranks have written their shards; raises as `save` does."""
        if self._written is not None and self._world.gather([float(self._written.done())]).min() > 0:
            self._complete()

    def finish(self) -> None:
        """Wait until the checkpoint is complete; raises as `save` does."""
        if self._written is not None:
            self._written.result()
            self._complete()
        if self._removed is not None:
            self._removed.result()
            self._removed = None

    def close(self) -> Path | None:
        """Finish, and return the newest checkpoint."""
        self.finish()
        self._thread.shutdown()
        return self.newest

    @staticmethod
    def _copy_and_write(begun: BegunSave) -> None:
        begun.shards.copy()
        begun.shards.write()

    def _wait_for_copy(self) -> None:
        if self._begun is not None:
            self._begun.shards.copied.wait()

    def _complete(self) -> None:
        assert self._begun is not None
        begun, self._begun, self._written = self._begun, None, None
        folder = begun.finish()
        self.newest = self.newest if begun.progress.spike else folder
        if self._world.is_first:
            self._removed = self._thread.submit(remove_hidden, self._files)
