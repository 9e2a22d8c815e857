# python -m dicp.conformance fuzz --seed 26112455 --start 161 --workers 1
import torch

# TorchRuntimeError: RuntimeError when making fake tensor call | Explanation: Dynamo failed to run FX node with fake tensors: call_function <built-in function setitem>(*(FakeTensor(..., size=(3,)), Ellipsis, FakeTensor(..., size=(3,))), **{}): got RuntimeError('more than one element of the written-to tensor refers to a single memory location') | Hint: Your code may result in an error when running in eager. Please double check that your code doesn't contain a similar error when actually running eager/uncompiled. You can do this by removing the `torch.compile` call, or by using `torch.compiler.set (_dynamo/exc.py:723 unimplemented)

def f(x0):
    x0[...] = x0
    v1 = x0.reshape(-1)
    v2 = torch.logaddexp(x0, x0 * 0.5)
    v3 = torch.nn.functional.hardswish(v2)
    v4 = v1.chunk(2, 0)[0]
    return (v1, v3, v4, )


def inputs():
    return [
        (torch.randint(-16, 17, (1,), generator=torch.Generator().manual_seed(2611245500016100)).to(torch.float32) / 8).expand((3,)),
    ]


compiled = torch.compile(f, backend='dicp_cpu', dynamic=False)
with torch.set_grad_enabled(False):
    expected, args = f(*(a := inputs())), a
    actual, args2 = compiled(*(b := inputs())), b
for e, a in zip(expected, actual):
    print('eager   ', e.dtype, tuple(e.shape), e.stride(), e.detach().flatten()[:8])
    print('compiled', a.dtype, tuple(a.shape), a.stride(), a.detach().flatten()[:8])
