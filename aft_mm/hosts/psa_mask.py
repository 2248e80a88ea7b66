"""Masks of point-wise spatial attention, operators of ``mmcv._ext``."""

import torch
import torch.nn.functional as F
from torch import Tensor


def psamask_forward(input: Tensor, output: Tensor, **options: int) -> None:
    """Point-wise spatial attention: lay the mask of each place over the whole map.

    Args:
        input: [B, h_mask · w_mask, H, W], a mask around each place.
        output: [B, H · W, H, W]; channels are targets of a place (psa_type 0), or the reverse (1).
    """
    batch, _, height, width = input.shape
    laid = input.new_zeros(batch, height * width + 1, height, width)
    laid.scatter_(1, _mask_places(options, input), input)
    laid = laid[:, :-1]
    if options['psa_type']:
        laid = laid.flatten(2).transpose(1, 2).reshape(laid.shape)
    output.copy_(laid)


def psamask_backward(grad_output: Tensor, grad_input: Tensor, **options: int) -> None:
    if options['psa_type']:
        grad_output = grad_output.flatten(2).transpose(1, 2).reshape(grad_output.shape)
    padded = F.pad(grad_output, (0, 0, 0, 0, 0, 1))
    grad_input.copy_(padded.gather(1, _mask_places(options, grad_input)))


def _mask_places(options: dict[str, int], like: Tensor) -> Tensor:
    height, width = options['h_feature'], options['w_feature']
    rows = torch.arange(options['h_mask'], device=like.device) - options['half_h_mask']
    columns = torch.arange(options['w_mask'], device=like.device) - options['half_w_mask']
    y = rows[:, None, None, None] + torch.arange(height, device=like.device)[:, None]
    x = columns[:, None, None] + torch.arange(width, device=like.device)
    outside = (y < 0) | (y >= height) | (x < 0) | (x >= width)
    places = (y * width + x).masked_fill(outside, height * width)
    return places.flatten(0, 1).expand(like.shape[0], -1, -1, -1)
