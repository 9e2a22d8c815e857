#!/usr/bin/env bash
# Make the environment that the other scripts run in: a virtual environment with PyTorch, what the tests need, and dicp
# itself (editable), plus a C++ compiler. Quick when nothing changed. To use what it made: . .venv/bin/activate
#
#   DICP_VENV        where the environment lives            (default: .venv in the project)
#   DICP_PYTHON      the Python 3.11 or 3.12 to build it on (default: the first found)
#   DICP_TORCH_SPEC  what pip installs as PyTorch           (default: what it was when the environment was made, at
#                    first torch==2.13.0). With PyTorch's CPU-only wheel index:
#                    DICP_TORCH_SPEC="torch==2.13.0 --index-url <that index>" saves gigabytes of CUDA libraries.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv="${DICP_VENV:-$PWD/.venv}"
made_with="$venv/.dicp_torch_spec"
installed_torch() {  # of an environment that says no more: its PyTorch stays
  "$venv/bin/python" -c 'from importlib.metadata import version; print("torch==" + version("torch").partition("+")[0])' 2>/dev/null
}
torch_spec="${DICP_TORCH_SPEC:-$(cat "$made_with" 2>/dev/null || installed_torch || echo torch==2.13.0)}"
stamp="$venv/.dicp_setup"

say() { printf 'setup: %s\n' "$*" >&2; }
die() { printf 'setup: error: %s\n' "$*" >&2; exit 1; }

usable_python() {  # usable_python <program>: a Python 3.11 or 3.12 that can make environments
  command -v "$1" >/dev/null 2>&1 &&
    "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' >/dev/null 2>&1
}

find_python() {
  local p
  if [ -n "${DICP_PYTHON:-}" ]; then
    usable_python "$DICP_PYTHON" || die "DICP_PYTHON=$DICP_PYTHON is no Python 3.11 or 3.12 with the venv module"
    echo "$DICP_PYTHON"
    return
  fi
  for p in python3.12 python3.11 python3 python; do
    if usable_python "$p"; then echo "$p"; return; fi
  done
  die "no Python 3.11 or 3.12 with the venv module found. Install one (Debian, Ubuntu: apt-get install python3 python3-venv;" \
      "Fedora: dnf install python3.12) or name one: DICP_PYTHON=/path/to/python3.12"
}

apt_install() {  # apt_install <package>...: true when it could
  [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1 || return 1
  say "installing $*"
  apt-get install -y -q "$@" >&2 || { apt-get update -q >&2 && apt-get install -y -q "$@" >&2; }
}

need_compiler() {
  command -v "${CXX:-g++}" >/dev/null 2>&1 && return
  command -v clang++ >/dev/null 2>&1 && return
  apt_install g++ || die "no C++ compiler found. Install g++ (Debian, Ubuntu: apt-get install g++; Fedora: dnf install" \
      "gcc-c++; macOS: xcode-select --install), or name one in CXX"
}

fingerprint() {  # of all that decides what gets installed
  { cat setup.py pyproject.toml scripts/setup_env.sh; echo "$torch_spec" "$PWD"; } | cksum
}

version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || echo "no working Python"; }

check_venv() {  # an environment that is there already is not torn down for another Python
  local has asked
  has="$(version_of "$venv/bin/python")"
  asked="$(version_of "${DICP_PYTHON:-$venv/bin/python}")"
  case "$has" in
    3.11|3.12) ;;
    *) die "$venv holds $has, not Python 3.11 or 3.12: remove it, or name another place in DICP_VENV" ;;
  esac
  [ "$has" = "$asked" ] ||
    die "$venv holds Python $has, DICP_PYTHON=$DICP_PYTHON is $asked: remove it, or name another place in DICP_VENV"
}

need_compiler
if [ -x "$venv/bin/python" ] || [ -L "$venv/bin/python" ]; then check_venv; fi
want="$(fingerprint)"
if [ -x "$venv/bin/python" ] && [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ]; then
  exit 0
fi

if [ ! -x "$venv/bin/python" ]; then
  python="$(find_python)"
  say "creating $venv with $("$python" --version)"
  "$python" -m venv "$venv"
fi
pip() { "$venv/bin/python" -m pip --disable-pip-version-check -q "$@"; }

say "installing packages (the first time: some minutes)"
pip install setuptools wheel numpy
# Torch by itself and first, so that nothing below can choose another build of it.
# shellcheck disable=SC2086  # the spec may carry options
pip install $torch_spec
echo "$torch_spec" > "$made_with"
mapfile -t tests < <("$venv/bin/python" - <<'PY'
import setuptools

found = {}
setuptools.setup = lambda **arguments: found.update(arguments)
exec(compile(open("setup.py").read(), "setup.py", "exec"), {"__file__": "setup.py", "__name__": "__main__"})
print(*found["extras_require"]["test"], sep="\n")
PY
)
pip install "${tests[@]}"
# The CUDA vendor's tests need Triton itself, not a GPU; the CPU build of PyTorch brings none.
"$venv/bin/python" -c 'import triton' 2>/dev/null || pip install --no-deps "triton>=3.6,<3.7"
pip install -e . --no-build-isolation --no-deps
"$venv/bin/python" -c 'import torch, dicp; print(f"setup: dicp {dicp.__version__}, torch {torch.__version__}: ready")' >&2
echo "$want" > "$stamp"
