"""Random numbers that do not depend on what ran before."""

from functools import partial

import numpy as np
from mmengine.dataset import worker_init_fn
from mmengine.hooks import Hook
from mmengine.runner import Runner, set_random_seed

from aft_mm.registry import HOOKS


@HOOKS.register_module()
class EpochSeedHook(Hook):
    """Seed every epoch from (seed, iterations done, rank): a resumed run repeats the unkilled one.

    mmengine's checkpoints hold no state of a random number generator: after a resume, dropout,
    Mixup and augmentation would draw what the first epoch drew. Workers of the training data
    loader are seeded alike, each epoch anew, which needs ``persistent_workers=False``.
    """

    def before_train_epoch(self, runner: Runner) -> None:
        """Seed this process and the workers that it is about to start."""
        seed, worker_seed = np.random.SeedSequence(
            [runner.seed, runner.iter, runner.rank]
        ).generate_state(2)
        set_random_seed(int(seed))
        loader = runner.train_dataloader
        loader.worker_init_fn = partial(
            worker_init_fn, num_workers=loader.num_workers, rank=0, seed=int(worker_seed) >> 1
        )
