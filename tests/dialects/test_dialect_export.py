"""The block and the model of each dialect leave for torch.export and ONNX with batch, sequence and past open."""

import pytest
import torch
from dialect_models import DIALECTS, Called, block, lively, some_hidden
from export_checks import BATCH, SEQ, SHAPES, Plain, exportable, onnx_run

both_parts = pytest.mark.parametrize("part", ["block", pytest.param("model", marks=pytest.mark.slow)])
all_dialects = pytest.mark.parametrize("dialect", DIALECTS)


def agree(run, module, inputs):
    with torch.no_grad():
        wanted = module(*inputs)
    found = run(inputs)
    assert len(found) == len(wanted)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


@all_dialects
def test_an_exported_block_agrees_at_four_shapes(dialect):
    case = exportable(dialect, "block")
    program = case.export().module()
    for shape in SHAPES:
        agree(lambda inputs: program(*inputs), case.module, case.inputs(*shape))


@all_dialects
def test_a_block_exported_without_cache_or_mask_agrees_at_other_shapes(dialect):
    made = lively(block(dialect))
    dynamic = ({0: BATCH, 1: SEQ},)
    program = torch.export.export(Plain(made), (some_hidden(2, 5),), dynamic_shapes=dynamic).module()
    for shape in ((3, 7), (1, 1), (1, 20), (2, 2)):
        x = some_hidden(*shape)
        torch.testing.assert_close(program(x), Called(made)(x), rtol=0, atol=1e-4)


@both_parts
@all_dialects
def test_onnx_agrees_with_torch_at_four_shapes_and_with_an_empty_past(dialect, part, tmp_path):
    case = exportable(dialect, part)
    program = case.export()
    exported, run = program.module(), onnx_run(program, tmp_path / "model.onnx")
    for shape in SHAPES:
        agree(lambda inputs: exported(*inputs), case.module, case.inputs(*shape))
        agree(run, case.module, case.inputs(*shape))


def test_what_looks_at_the_values_of_masks_and_positions_stays_out_of_compiled_code():
    """In one graph nothing can wait for a value."""
    x, keep = some_hidden(2, 5), torch.ones(2, 5, dtype=torch.bool)
    keep[0, :2] = False
    added, places = torch.zeros(2, 1, 1, 5).masked_fill(~keep[:, None, None], -1e9), torch.arange(5)[None]
    present = tuple(torch.zeros(2, 3, 0, 8) for _ in range(2))
    for dialect, inputs in (("slm", (places, added)), ("cyberslm", (keep.float(), False, present))):
        made = lively(block(dialect))
        compiled = torch.compile(made, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(x, *inputs)[0], made(x, *inputs)[0])
