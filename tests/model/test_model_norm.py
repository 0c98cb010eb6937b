import torch

from modicum.model import RMSNorm


def test_fp16_stays_finite_where_its_squares_overflow():
    x = torch.full((2, 4096), 300.0, dtype=torch.float16)
    assert torch.isinf(x.square().sum())  # the naive way
    out = RMSNorm(4096, 1e-5).half()(x)
    assert out.dtype == torch.float16
    torch.testing.assert_close(out, torch.ones_like(out))


def test_fp16_gradients_stay_finite_too():
    x = torch.full((2, 4096), 300.0, dtype=torch.float16, requires_grad=True)
    norm = RMSNorm(4096, 1e-5).half()
    norm(x).sum().backward()
    assert torch.isfinite(x.grad).all()
    assert torch.isfinite(norm.weight.grad).all()


def test_it_is_x_over_its_root_mean_square_times_the_gain():
    norm = RMSNorm(3, 0.0)
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([1.0, 2.0, -1.0]))
    # rms of (1, 2, 2) is sqrt(3)
    torch.testing.assert_close(norm(torch.tensor([1.0, 2.0, 2.0])), torch.tensor([1.0, 4.0, -2.0]) / 3**0.5)


def test_the_cast_comes_before_the_gain():
    norm = RMSNorm(64, 1e-6).bfloat16()
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(0.1, 3, 64))
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    normal = x.float() / (x.float().square().mean(-1, keepdim=True) + 1e-6).sqrt()
    assert torch.equal(norm(x), normal.bfloat16() * norm.weight)


def test_a_fp32_gain_leaves_a_bf16_input_bf16():
    assert RMSNorm(8, 1e-5)(torch.ones(1, 8, dtype=torch.bfloat16)).dtype == torch.bfloat16
