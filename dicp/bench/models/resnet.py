"""ResNet-50 in plain PyTorch (He et al., "Deep Residual Learning for Image Recognition", 2015; the stride
of a bottleneck in its 3x3 convolution, as all published weights have it)."""

import torch
from torch import Tensor, nn

EXPANSION = 4  # of a bottleneck: output channels over inner channels


class Bottleneck(nn.Module):
    """relu(x + bn(1x1(relu(bn(3x3(relu(bn(1x1(x))))))))), the skipped x projected where its shape differs."""

    def __init__(self, channels_in: int, width: int, stride: int = 1) -> None:
        super().__init__()
        channels_out = width * EXPANSION
        self.conv1 = nn.Conv2d(channels_in, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, channels_out, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(channels_out)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or channels_in != channels_out:
            self.downsample = nn.Sequential(
                nn.Conv2d(channels_in, channels_out, 1, stride=stride, bias=False),
                nn.BatchNorm2d(channels_out),
            )

    def forward(self, x: Tensor) -> Tensor:
        skipped = x if self.downsample is None else self.downsample(x)
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        y += skipped
        return self.relu(y)


class ResNet(nn.Module):
    """Images [B, 3, H, W] to class scores [B, classes]. `blocks` (3, 4, 6, 3) with width 64 is ResNet-50."""

    def __init__(self, blocks: tuple[int, ...] = (3, 4, 6, 3), width: int = 64, classes: int = 1000) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        stages, channels = [], width
        for stage, count in enumerate(blocks):
            inner = width * 2**stage
            units: list[nn.Module] = []
            for unit in range(count):
                units.append(Bottleneck(channels, inner, stride=2 if stage > 0 and unit == 0 else 1))
                channels = inner * EXPANSION
            stages.append(nn.Sequential(*units))
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(channels, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


def resnet50(classes: int = 1000) -> ResNet:
    """The real one: 25 557 032 parameters at 1000 classes."""
    return ResNet(classes=classes)
