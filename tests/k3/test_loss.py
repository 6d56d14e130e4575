"""The loss: aligned labels, ignore index, mask, the shifted convention, and nothing left to learn from."""

import pytest
import torch

from k3.loss import lm_loss, shift_labels
from tests.k3.support import ids, lively, tiny


def test_mean_over_what_counts():
    """Cross entropy summed over unmasked labels other than -100, divided by their weight."""
    logits, labels = torch.randn(2, 4, 7, dtype=torch.float64), torch.randint(0, 7, (2, 4))
    labels[0, 1] = -100
    mask = torch.tensor([[1.0, 1, 0, 1], [0.5, 1, 1, 0]])
    terms = [(b, t) for b in range(2) for t in range(4) if labels[b, t] != -100]
    ce = {(b, t): -logits[b, t].log_softmax(-1)[labels[b, t]] for b, t in terms}
    wanted = sum(mask[k] * v for k, v in ce.items()) / sum(mask[k] for k in ce)
    torch.testing.assert_close(lm_loss(logits, labels, mask), wanted, check_dtype=False)
    torch.testing.assert_close(lm_loss(logits, labels), sum(ce.values()) / len(ce))


def test_nothing_to_learn():
    """With every label ignored, or masked, the loss is 0 and its gradients are zeros, not NaN."""
    model, x = lively(tiny()), ids(1, 5)
    for kwargs in ({"labels": torch.full_like(x, -100)}, {"labels": x, "loss_mask": torch.zeros(1, 5)}):
        model.zero_grad()
        loss = model(x, **kwargs)["loss"]
        loss.backward()
        assert loss == 0 and all(not p.grad.any() for p in model.parameters() if p.grad is not None)


def test_float32_from_bfloat16():
    """bfloat16 logits give a float32 loss, computed from them after the cast."""
    logits, labels = torch.randn(1, 3, 50).bfloat16(), torch.tensor([[1, 2, 3]])
    found = lm_loss(logits, labels)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, torch.nn.functional.cross_entropy(logits.float()[0], labels[0]))


def test_shift_respects_documents():
    """Shifted labels are the next token's; the last token of a row or of a document predicts nothing."""
    labels = torch.tensor([[1, 2, 3, 4, 5]])
    assert shift_labels(labels).tolist() == [[2, 3, 4, 5, -100]]
    assert shift_labels(labels, torch.tensor([0, 2, 2, 5])).tolist() == [[2, -100, 4, 5, -100]]


def test_shift_is_an_option_of_the_model():
    """`shift_labels=True` on ids equals aligned labels made by hand; the default shifts nothing."""
    model, x = lively(tiny()), ids(2, 6)
    aligned = torch.nn.functional.pad(x[:, 1:], (0, 1), value=-100)
    shifted = model(x, labels=x, shift_labels=True)["loss"]
    torch.testing.assert_close(shifted, model(x, labels=aligned)["loss"])
    assert shifted != model(x, labels=x)["loss"]


def test_shapes_are_checked():
    """Labels of another shape are refused with both shapes."""
    with pytest.raises(ValueError, match=r"labels \(1, 4\).*\(1, 5\)"):
        lively(tiny())(ids(1, 5), labels=ids(1, 4))
