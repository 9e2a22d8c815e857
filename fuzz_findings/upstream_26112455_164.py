# python -m dicp.conformance fuzz --seed 26112455 --start 164 --workers 1
import torch

# RuntimeError: more than one element of the written-to tensor refers to a single memory location (torch/_meta_registrations.py:683 meta_copy_)

def f(x0, x1):
    v0 = x0.to(torch.float64)
    v1 = v0.narrow(1, 1, 2)
    v2 = torch.linspace(0, 1, x1.shape[0])
    v3 = torch.cat([v0, v0, v0], 0)
    v4 = v3 @ v0.mT
    v5 = torch.nn.functional.leaky_relu(v2, 0.1)
    v6 = torch.eye(v4.shape[-1])
    v7 = torch.minimum(v4, v4)
    x1.zero_()
    v9 = torch.addcmul(v4, v4, v5.to(v4.dtype), value=0.5)
    v10 = torch.where(v2 > v2 - 1, v2, v9)
    v11 = v10.select(1, 0)
    v12 = torch.nn.functional.pad(v11, (-1, 1))
    v7.select(-1, -1).copy_(v7.select(-1, 0))
    return (v0, v1, v6, v12, )


def inputs():
    return [
        torch.randint(-16, 17, (3, 5), generator=torch.Generator().manual_seed(2611245500016400)).to(torch.float32) / 8,
        (torch.randint(-16, 17, (1, 5), generator=torch.Generator().manual_seed(2611245500016401)).to(torch.uint8)).expand((3, 5)),
    ]


compiled = torch.compile(f, backend='dicp_cpu', dynamic=False)
with torch.set_grad_enabled(False):
    expected, args = f(*(a := inputs())), a
    actual, args2 = compiled(*(b := inputs())), b
for e, a in zip(expected, actual):
    print('eager   ', e.dtype, tuple(e.shape), e.stride(), e.detach().flatten()[:8])
    print('compiled', a.dtype, tuple(a.shape), a.stride(), a.detach().flatten()[:8])
