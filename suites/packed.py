"""Packed documents: every document of a packed row computes what it computes alone."""

import pytest
import torch

from k3.sequence import SequenceLayout
from suites import oracle, proxies
from suites.goldens import close, relative
from suites.models import build, public_gradients

BOUNDS = [0, 1, 8, 8, 10, 31]  # one token, an empty document, shorter than the taps


@pytest.fixture
def packed():
    """Ids and labels [1, T] of packed documents, their layout, and the parts by document."""
    ids, labels = proxies.tokens(BOUNDS[-1], batch=1)
    spans = [(a, b) for a, b in zip(BOUNDS, BOUNDS[1:], strict=False) if b > a]
    parts = [(ids[:, a:b], labels[:, a:b]) for a, b in spans]
    return ids, labels, SequenceLayout(cu_seqlens=torch.tensor(BOUNDS, dtype=torch.int32)), parts


def test_logits(packed):
    """Logits of a packed row are those of its documents one by one, by the oracle: no state, tap or key leaks."""
    ids, _, layout, parts = packed
    tensors = proxies.odd()
    wanted = torch.cat([oracle.forward(tensors, proxies.ODD_TEXT, part) for part, _ in parts], dim=1)
    close(build(proxies.ODD, tensors, torch.float64)(ids, layout=layout)["logits"], wanted, 1e-9, "logits")


def test_gradients(packed):
    """Gradients of the packed loss are those of its documents, weighted by their labels."""
    ids, labels, layout, parts = packed
    tensors = {name: tensor.requires_grad_() for name, tensor in proxies.odd().items()}
    logits = torch.cat([oracle.forward(tensors, proxies.ODD_TEXT, part) for part, _ in parts], dim=1)
    oracle.loss(logits, labels).backward()
    model = build(proxies.ODD, {n: t.detach() for n, t in tensors.items()}, torch.float64)
    model(ids, labels=labels, layout=layout)["loss"].backward()
    found = public_gradients(model)
    for name, tensor in tensors.items():
        if tensor.grad is not None:
            relative(found[name], tensor.grad, 1e-7, name)


def test_shifted_labels_stay_inside_documents(packed):
    """The shifted convention never asks the last token of a document for the first of the next."""
    ids, _, layout, parts = packed
    model = build(proxies.ODD, proxies.odd(), torch.float64)
    found = model(ids, labels=ids, layout=layout, shift_labels=True)["loss"]
    logits = [model(part)["logits"][:, :-1] for part, _ in parts]
    wanted = oracle.loss(torch.cat(logits, dim=1), torch.cat([part[:, 1:] for part, _ in parts], dim=1))
    close(found, wanted, 1e-9, "loss")


@pytest.mark.parametrize("bounds", [[0, 5, 30], [1, 31], [0, 20, 10, 31]])
def test_refuses_wrong_bounds(packed, bounds):
    """Bounds that do not rise from 0 to T are refused."""
    model = build(proxies.ODD, proxies.odd())
    with pytest.raises(ValueError, match="cu_seqlens"):
        model(packed[0], layout=SequenceLayout(cu_seqlens=torch.tensor(bounds, dtype=torch.int32)))
