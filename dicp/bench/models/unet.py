"""A UNet with attention, as latent-diffusion models have it (Ho et al., "Denoising Diffusion Probabilistic
Models", 2020; Rombach et al., "High-Resolution Image Synthesis with Latent Diffusion Models", 2022)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def step_embedding(t: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Sines and cosines [B, width] of the steps t [B], at wavelengths from 2 pi to 10 000 times that."""
    rates = torch.exp(torch.arange(width // 2, device=t.device) * (-math.log(10000.0) / (width // 2)))
    angles = t[:, None].to(rates.dtype) * rates[None]
    return torch.cat([angles.sin(), angles.cos()], dim=1).to(dtype)


class Residual(nn.Module):
    """x + conv(silu(norm(conv(silu(norm(x))) + step))), the skipped x projected where its width differs."""

    def __init__(self, channels_in: int, channels_out: int, step_width: int, groups: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(groups, channels_in)
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, padding=1)
        self.step = nn.Linear(step_width, channels_out)
        self.norm2 = nn.GroupNorm(groups, channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1)
        same = channels_in == channels_out
        self.skip = nn.Identity() if same else nn.Conv2d(channels_in, channels_out, 1)

    def forward(self, x: Tensor, step: Tensor) -> Tensor:
        y = self.conv1(F.silu(self.norm1(x)))
        y = y + self.step(F.silu(step))[:, :, None, None]
        return self.skip(x) + self.conv2(F.silu(self.norm2(y)))


class Attention(nn.Module):
    """Self-attention over the positions of an image [B, C, H, W], added to it."""

    def __init__(self, channels: int, heads: int, groups: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.GroupNorm(groups, channels)
        self.qkv = nn.Linear(channels, 3 * channels)
        self.out = nn.Linear(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, height, width = x.shape
        tokens = self.norm(x).flatten(2).transpose(1, 2)
        split = self.qkv(tokens).view(batch, height * width, 3, self.heads, channels // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return x + self.out(mixed).transpose(1, 2).reshape(batch, channels, height, width)


class UNet(nn.Module):
    """Latents [B, 4, H, W] and steps [B] to the noise in them [B, 4, H, W]. A level for each width: two
    residual blocks down and three up, with attention at all levels but the first; H and W are halved between
    levels."""

    def __init__(
        self,
        channels: tuple[int, ...] = (128, 256, 512),
        heads: int = 8,
        groups: int = 32,
        latent: int = 4,
        depth: int = 2,
    ) -> None:
        super().__init__()
        self.width, step_width = channels[0], 4 * channels[0]
        self.embed = nn.Sequential(
            nn.Linear(self.width, step_width), nn.SiLU(), nn.Linear(step_width, step_width)
        )
        self.first = nn.Conv2d(latent, channels[0], 3, padding=1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        kept, now = [channels[0]], channels[0]
        for level, wide in enumerate(channels):
            for _ in range(depth):
                self.down.append(self._block(now, wide, step_width, heads if level else 0, groups))
                kept.append(now := wide)
            if level < len(channels) - 1:
                self.down.append(nn.Conv2d(now, now, 3, stride=2, padding=1))
                kept.append(now)
        self.middle = self._block(now, now, step_width, heads, groups)
        for level, wide in reversed(list(enumerate(channels))):
            for _ in range(depth + 1):
                self.up.append(
                    self._block(now + kept.pop(), wide, step_width, heads if level else 0, groups)
                )
                now = wide
            if level:
                self.up.append(nn.Conv2d(now, now, 3, padding=1))
        self.norm = nn.GroupNorm(groups, now)
        self.last = nn.Conv2d(now, latent, 3, padding=1)

    @staticmethod
    def _block(channels_in: int, channels_out: int, step_width: int, heads: int, groups: int) -> nn.Module:
        parts: list[nn.Module] = [Residual(channels_in, channels_out, step_width, groups)]
        if heads:
            parts.append(Attention(channels_out, heads, groups))
        return nn.ModuleList(parts)

    @staticmethod
    def _run(block: nn.Module, x: Tensor, step: Tensor) -> Tensor:
        for part in block:  # type: ignore[attr-defined]
            x = part(x, step) if isinstance(part, Residual) else part(x)
        return x

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        step = self.embed(step_embedding(t, self.width, x.dtype))
        x = self.first(x)
        kept = [x]
        for block in self.down:
            x = block(x) if isinstance(block, nn.Conv2d) else self._run(block, x, step)
            kept.append(x)
        x = self._run(self.middle, x, step)
        for block in self.up:
            if isinstance(block, nn.Conv2d):
                x = block(F.interpolate(x, scale_factor=2.0, mode="nearest"))
            else:
                x = self._run(block, torch.cat([x, kept.pop()], dim=1), step)
        return self.last(F.silu(self.norm(x)))
