"""One-way distances (ATSP) and a vehicle with a capacity (CVRP), by the model of tours."""

import torch
from model import Encoded, TourModel, tour_lengths
from torch import Tensor, nn

# Of the usual instances by their number of customers, whose demands are 1 … 9.
CAPACITIES = {20: 30, 50: 40, 100: 50}
OTHER_CAPACITY = 30


class OneWayModel(TourModel):
    """Model of the asymmetric travelling salesman problem: an instance is distances [B, N, N]."""

    features = 4

    @staticmethod
    def sample(batch: int, points: int) -> Tensor:
        """Return distances [B, N, N] without shortcuts: the shortest paths of uniform numbers."""
        distances = torch.rand(batch, points, points)
        distances.diagonal(dim1=1, dim2=2).zero_()
        for stop in range(points):
            detour = distances[:, :, stop, None] + distances[:, None, stop]
            distances = torch.minimum(distances, detour)
        return distances

    @staticmethod
    def costs(distances: Tensor, tours: Tensor) -> Tensor:
        batch = torch.arange(len(distances))[:, None, None]
        return distances[batch, tours, tours.roll(-1, 2)].sum(-1)

    def encode(self, distances: Tensor) -> Encoded:
        """Encode nodes by the mean and the smallest of their distances, both ways."""
        # As far apart as uniform points, in any unit.
        distances = 0.52 * distances / distances.mean((1, 2), keepdim=True)
        own = torch.eye(distances.shape[1], dtype=torch.bool)
        others = distances.masked_fill(own, torch.inf)
        parts = [distances.mean(1), distances.mean(2), others.amin(1), others.amin(2)]
        return self._encode(torch.stack(parts, -1), distances)


class Vehicles:
    """R vehicles per instance that start at the depot, node 0, with a load of 1."""

    def __init__(self, demand: Tensor, count: int) -> None:
        self.demand = demand.unsqueeze(1).expand(-1, count, -1)  # [B, R, N], 0 at the depot
        self.left = self.demand > 0  # customers to visit
        self.load = torch.ones_like(self.demand[..., 0])
        self.at = torch.zeros_like(self.load, dtype=torch.long)

    def open(self) -> Tensor:
        """Return the nodes [B, R, N] that may be next; only the depot when all were visited."""
        nodes = self.left & (self.demand <= self.load.unsqueeze(-1) + 1e-5)
        nodes[..., 0] = (self.at != 0) | ~self.left.any(-1)
        return nodes

    def visit(self, node: Tensor) -> None:
        chosen = node.unsqueeze(-1)
        load = self.load - self.demand.gather(-1, chosen).squeeze(-1)
        self.load = load.masked_fill(node == 0, 1.0)
        self.left = self.left.scatter(-1, chosen, False)
        self.at = node


class RouteModel(TourModel):
    """Model of the capacitated vehicle routing problem.

    An instance [B, 1 + N, 3] has places and demands, as parts of the capacity; the depot is first.
    A tour starts at the depot and returns to it between routes.
    """

    features = 4

    def __init__(self, mixer: str, embed_dims: int = 64, num_layers: int = 3) -> None:
        super().__init__(mixer, embed_dims, num_layers)
        self.of_load = nn.Linear(1, embed_dims, bias=False)

    @staticmethod
    def sample(batch: int, points: int) -> Tensor:
        demand = torch.randint(1, 10, (batch, points + 1, 1)) / CAPACITIES.get(
            points, OTHER_CAPACITY
        )
        demand[:, 0] = 0
        return torch.cat([torch.rand(batch, points + 1, 2), demand], -1)

    @staticmethod
    def costs(instances: Tensor, tours: Tensor) -> Tensor:
        return tour_lengths(instances[..., :2], tours)

    def encode(self, instances: Tensor) -> Encoded:
        places = instances[..., :2]
        is_depot = torch.zeros_like(places[..., :1])
        is_depot[:, 0] = 1
        encoded = self._encode(torch.cat([instances, is_depot], -1), torch.cdist(places, places))
        return encoded._replace(demand=instances[..., 2])

    def next_logits(self, encoded: Encoded, last: Tensor, open_: Tensor, load: Tensor) -> Tensor:
        """Return the logits [B, R, N] after the nodes `last`, with a load [B, R]."""
        extra = self.of_load(load.unsqueeze(-1))
        return self.logits(encoded, torch.zeros_like(last), last, open_, extra)

    @torch.no_grad()
    def roll_out(self, encoded: Encoded, starts: Tensor, sample: bool) -> Tensor:
        """Return a tour [B, P, L] whose first customer is 1 + start, for each start [B, P]."""
        vehicles = Vehicles(encoded.demand, starts.shape[1])
        tour = [vehicles.at, 1 + starts]
        vehicles.visit(tour[-1])
        while vehicles.left.any():
            scores = self.next_logits(encoded, vehicles.at, vehicles.open(), vehicles.load)
            if sample:
                scores -= torch.empty_like(scores).exponential_().log_()
            tour.append(scores.argmax(-1))
            vehicles.visit(tour[-1])
        return torch.stack(tour, -1)

    def log_probabilities(self, encoded: Encoded, tours: Tensor) -> Tensor:
        vehicles, open_, loads = Vehicles(encoded.demand, tours.shape[1]), [], []
        for node in tours[..., 1:-1].unbind(-1):
            vehicles.visit(node)
            open_.append(vehicles.open())
            loads.append(vehicles.load)
        rows = tours[..., 1:-1], torch.stack(open_, 2), torch.stack(loads, 2)
        scores = self.next_logits(encoded, *(x.flatten(1, 2) for x in rows)).log_softmax(-1)
        chosen = tours[..., 2:].flatten(1).unsqueeze(-1)
        return scores.gather(-1, chosen).squeeze(-1).unflatten(1, (tours.shape[1], -1)).sum(-1)


MODELS = dict(tsp=TourModel, atsp=OneWayModel, cvrp=RouteModel)
