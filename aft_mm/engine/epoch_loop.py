"""Training by epochs that ends and goes on inside an epoch."""

from itertools import islice

from mmengine.runner import EpochBasedTrainLoop
from torch.utils.data import DataLoader


class StoppableEpochLoop(EpochBasedTrainLoop):
    """mmengine's loop of epochs, which looks at ``stop_training`` after every iteration.

    An epoch that is left early counts as not done, is followed by no ``after_train_epoch`` and is
    not validated. With ``num_done`` the next epoch goes on after so many of its iterations.
    """

    num_done = 0
    begin = (0, 0)  # epoch and iteration at which the epoch that runs would have begun

    def run_epoch(self) -> None:
        """An epoch, or what is left of it, up to its end or to ``stop_training``."""
        num_done, self.num_done = self.num_done, 0
        self.begin = self._epoch, self._iter - num_done
        self.runner.call_hook('before_train_epoch')
        self.runner.model.train()
        loader = rest(self.dataloader, num_done) if num_done else self.dataloader
        for index, batch in enumerate(loader, num_done):
            self.run_iter(index, batch)
            if self.stop_training and index + 1 < len(self.dataloader):
                self.val_begin = self.max_epochs + 1  # the loop would validate the epoch before
                return
        self.runner.call_hook('after_train_epoch')
        self._epoch += 1

    def num_done_at(self, epoch: int, iteration: int) -> int:
        """How many iterations of ``epoch``, counted from 0, are done after ``iteration`` in all."""
        return iteration - self.begin[1] if epoch == self.begin[0] else 0


def rest(loader: DataLoader, num_done: int) -> DataLoader:
    """A loader of the same batches without the first ``num_done``, whose samples nobody reads."""
    return DataLoader(
        loader.dataset,
        batch_sampler=list(islice(loader.batch_sampler, num_done, None)),
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
    )
