# python -m dicp.conformance fuzz --seed 26112455 --start 27 --workers 1
import torch

# RuntimeError: While executing unfold, functionalization encountered a tensor being mutated that has internal overlap. When using torch.compile (or running functionalization directly), this is banned as the behavior is not well defined. Consider cloning the tensor before mutating it, or removing the mutation from your model. | While executing %copy_ : [num_users=0] = call_method[target=copy_](args = (%v1, %v0), kwargs = {}) | Original traceback: (_subclasses/functional_tensor.py:625 __torch_dispatch__)

def f(x0, x1, x2):
    v0 = torch.add(x2, x2, alpha=0.5)
    v1 = x0.unfold(-1, 2, 1)
    x0.add_(x2)
    v3 = torch.add(v0, x1, alpha=0.5)
    v1.copy_(v0)
    v5 = torch.linalg.vector_norm(x2 + 2)
    v6 = v0.repeat(3)
    v7 = torch.cosh(v0.clamp(-3, 3))
    return (v3, v5, v6, v7, )


def inputs():
    return [
        torch.randint(-16, 17, (3,), generator=torch.Generator().manual_seed(2611245500002700)).to(torch.float32) / 8,
        torch.randint(-16, 17, (), generator=torch.Generator().manual_seed(2611245500002701)).to(torch.bfloat16) / 8,
        torch.randint(-16, 17, (), generator=torch.Generator().manual_seed(2611245500002702)).to(torch.float32) / 8,
    ]


compiled = torch.compile(f, backend='dicp_cpu', dynamic=True)
with torch.set_grad_enabled(False):
    expected, args = f(*(a := inputs())), a
    actual, args2 = compiled(*(b := inputs())), b
for e, a in zip(expected, actual):
    print('eager   ', e.dtype, tuple(e.shape), e.stride(), e.detach().flatten()[:8])
    print('compiled', a.dtype, tuple(a.shape), a.stride(), a.detach().flatten()[:8])
