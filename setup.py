"""Packaging of dicp: what is installed, what it needs, and the names through which PyTorch finds it."""

from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
BRIDGE = "dicp.dynamo_bridge.backend"

setup(
    name="dicp",
    version="0.1.0",
    description="A torch.compile backend, and a kit for making one: graphs to fused kernels, for any device",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    # The mapping says the default, and yet makes `pip install -e` use a path file: an import hook would lose
    # against any folder named dicp beside the user's script, such as a clone of this project.
    package_dir={"": "."},
    packages=find_packages(include=["dicp", "dicp.*"]),
    package_data={
        "dicp": ["py.typed"],
        "dicp.conformance": ["*.csv", "*.html", "*.json"],
        "dicp.vendor.cpu_graph": ["include/*.h", "*.c"],
        "dicp.vendor.cuda_graph": ["*.c"],
    },
    python_requires=">=3.11,<3.13",
    install_requires=["torch>=2.11,<2.15", "numpy", "sympy"],
    extras_require={
        "test": [
            "expecttest",
            "hypothesis",
            "mypy",
            "psutil",
            "pytest",
            "pytest-xdist",
            "ruff",
            "transformers>=5.20,<5.24",
        ],
    },
    entry_points={
        "torch_dynamo_backends": [
            f"dicp = {BRIDGE}:dicp",
            f"dicp_cpu = {BRIDGE}:dicp_cpu",
            f"dicp_cuda = {BRIDGE}:dicp_cuda",
            f"cpugraph = {BRIDGE}:dicp_cpu",
            f"cudagraph = {BRIDGE}:dicp_cuda",
        ],
        "dicp.vendors": [
            "cpu_graph = dicp.vendor.cpu_graph:vendor",
            "cuda_graph = dicp.vendor.cuda_graph:vendor",
        ],
        # Called by `import torch`: makes TORCH_LOGS="+dicp" a known name before torch parses it.
        "torch.backends": ["dicp = dicp.autoload:register"],
    },
)
