"""The models as a policy that RL4CO trains (`pip install rl4co`).

from rl4co.envs import CVRPEnv
from rl4co.models import POMO
from rl4co_policy import make_policy

env = CVRPEnv(generator_params=dict(num_loc=20))
model = POMO(env, policy=make_policy('cvrp'), batch_size=64)  # for rl4co.utils.RL4COTrainer
"""

from typing import Any

import torch
from model import Encoded
from problems import MODELS
from rl4co.models.common.constructive.base import (
    ConstructiveDecoder,
    ConstructiveEncoder,
    ConstructivePolicy,
)
from tensordict import TensorDict
from torch import Tensor, nn


class Encoder(ConstructiveEncoder):
    def __init__(self, problem: str, model: nn.Module) -> None:
        super().__init__()
        self.problem, self.model = problem, model

    def forward(self, td: TensorDict) -> tuple[Encoded, None]:
        if self.problem == 'atsp':
            return self.model.encode(td['cost_matrix']), None
        instances = td['locs']
        if self.problem == 'cvrp':
            demand = torch.cat([torch.zeros_like(td['demand'][:, :1]), td['demand']], 1)
            instances = torch.cat([instances, demand.unsqueeze(-1)], -1)
        return self.model.encode(instances), None


class Decoder(ConstructiveDecoder):
    def __init__(self, problem: str, model: nn.Module) -> None:
        super().__init__()
        self.problem, self.model = problem, model

    def pre_decoder_hook(
        self, td: TensorDict, env: Any, hidden: Encoded, num_starts: int = 0
    ) -> tuple[TensorDict, Any, Encoded]:
        """Repeat the encoded instances as the library repeats its states."""
        copies = max(num_starts, 1)
        repeated = (None if x is None else x.repeat(copies, *[1] * (x.dim() - 1)) for x in hidden)
        return td, env, Encoded(*repeated)

    def forward(
        self, td: TensorDict, hidden: Encoded, num_starts: int = 0
    ) -> tuple[Tensor, Tensor]:
        mask, last = td['action_mask'], td['current_node'].view(-1, 1)
        if self.problem == 'cvrp':
            load = td['vehicle_capacity'] - td['used_capacity']
            scores = self.model.next_logits(hidden, last, mask.unsqueeze(1), load)
        else:
            first = td['first_node'].view(-1, 1)
            scores = self.model.logits(hidden, first, last, mask.unsqueeze(1))
        return scores.squeeze(1), mask


def make_policy(problem: str, embed_dims: int = 64, num_layers: int = 3) -> ConstructivePolicy:
    """Return a policy for the environment 'tsp', 'atsp' or 'cvrp'."""
    model = MODELS[problem]('aft', embed_dims, num_layers)
    return ConstructivePolicy(Encoder(problem, model), Decoder(problem, model), problem)
