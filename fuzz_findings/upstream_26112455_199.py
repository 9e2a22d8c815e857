# python -m dicp.conformance fuzz --seed 26112455 --start 199 --workers 1
import torch

# RuntimeError: more than one element of the written-to tensor refers to a single memory location (torch/_meta_registrations.py:683 meta_copy_)

def f(x0):
    v0 = torch.abs(x0)
    v1 = torch.lerp(x0, x0.to(x0.dtype), 0.25)
    x0.zero_()
    v3 = torch.argmin(x0, 0)
    return (v0, v1, v3, )


def inputs():
    return [
        (torch.randint(-16, 17, (1, 16), generator=torch.Generator().manual_seed(2611245500019900)).to(torch.bfloat16) / 8).expand((7, 16)),
    ]


compiled = torch.compile(f, backend='dicp_cpu', dynamic=True)
with torch.set_grad_enabled(True):
    expected, args = f(*(a := inputs())), a
    actual, args2 = compiled(*(b := inputs())), b
for name, outs, given in (('eager', expected, args), ('compiled', actual, args2)):
    sum(o.double().sum() for o in outs if o.requires_grad).backward()
    print(name, 'gradients', [g.grad for g in given])
for e, a in zip(expected, actual):
    print('eager   ', e.dtype, tuple(e.shape), e.stride(), e.detach().flatten()[:8])
    print('compiled', a.dtype, tuple(a.shape), a.stride(), a.detach().flatten()[:8])
