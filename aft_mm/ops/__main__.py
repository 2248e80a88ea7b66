"""``python -m aft_mm.ops``: the table of ops and backends, and why each is or is not available."""

import torch

from .dispatch import BACKENDS, ENVIRONMENT_VARIABLE, OPS, choose_backend, reasons_against


def _devices() -> list[torch.device]:
    available = {'cuda': torch.cuda.is_available(), 'mps': torch.backends.mps.is_available()}
    return [torch.device(name) for name in ('cpu', *(n for n, here in available.items() if here))]


def main() -> None:
    """Print one row per op and device, one column per backend, then the reasons."""
    width = max(map(len, OPS))
    columns = ''.join(f'{name:>12}' for name in BACKENDS)
    print(f'{"op":<{width}}  device{columns}')
    reasons = {}
    for device in _devices():
        serving = choose_backend(device)
        for op in OPS:
            cells = []
            for backend, module in BACKENDS.items():
                against = reasons_against(backend, device)
                if not hasattr(module, op):
                    against = [f'has no {op}', *against]
                if against:
                    reasons[backend, device.type] = against
                cells.append('serves' if backend == serving else 'no' if against else 'available')
            print(f'{op:<{width}}  {device.type:<6}' + ''.join(f'{cell:>12}' for cell in cells))
    for backend, module in BACKENDS.items():
        print(f'{backend}: {module.__doc__.splitlines()[0]}')
    for (backend, device), against in reasons.items():
        print(f'{backend} does not serve {device}: {"; ".join(against)}')
    print(f'{ENVIRONMENT_VARIABLE} chooses a backend: {", ".join(BACKENDS)}')


if __name__ == '__main__':
    main()
