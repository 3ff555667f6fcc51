"""Quantised and half-precision ONNX models against the float program."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import llmdebug_nb as ld
from llmdebug_nb.capture.graphs.placed_graph import ExportedNode, PlacedGraph
from onnx_models import _export

onnxruntime = pytest.importorskip("onnxruntime")
X = torch.randn(4, 16, generator=torch.Generator().manual_seed(0)) * 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inp, self.norm, self.head = nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 20)
        self.ups = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, x):
        x = self.inp(x)
        for up in self.ups:
            x = x + F.relu(up(x))
        return self.head(self.norm(x))


def calibration(scale):
    from onnxruntime.quantization import CalibrationDataReader

    class Once(CalibrationDataReader):
        def __init__(self):
            self.left = [{"x": (X * scale).numpy()}]

        def get_next(self):
            return self.left.pop() if self.left else None

    return Once()


def run(source, path, name, **options):
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(source), settings)
    with ld.dump(session, name=name, path=path, **options) as recorded:
        session.run(None, {"x": X.numpy()})
    return recorded


def golden(path, **options):
    model = Net().eval()
    with torch.no_grad(), ld.dump(model, name="golden", path=path, **options) as recorded:
        model(X)
    onnx.save(_export(model, (X,), input_names=["x"]), str(path / "float.onnx"))
    return recorded


def static(path, scale=1.0, per_channel=True, operators=False, unsigned=False):
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_static

    quantize_static(
        path / "float.onnx", path / "q.onnx", calibration(scale), per_channel=per_channel,
        quant_format=QuantFormat.QOperator if operators else QuantFormat.QDQ,
        activation_type=QuantType.QUInt8 if unsigned else QuantType.QInt8,
        weight_type=QuantType.QInt8,
    )  # fmt: skip
    return path / "q.onnx"


def dynamic(path):
    from onnxruntime.quantization import QuantType, quantize_dynamic

    quantize_dynamic(path / "float.onnx", path / "q.onnx", weight_type=QuantType.QInt8)
    return path / "q.onnx"


WAYS = {
    "qdq": static,
    "qdq, unsigned, by tensor": lambda path: static(path, per_channel=False, unsigned=True),
    "operators": lambda path: static(path, per_channel=False, operators=True, unsigned=True),
    "dynamic": dynamic,
}


@pytest.mark.parametrize("way", WAYS)
def test_a_right_quantised_session_is_within_noise_of_the_module_and_of_the_float_session(
    way, tmp_path
):
    wanted = golden(tmp_path, weights=True)
    floats = run(tmp_path / "float.onnx", tmp_path, "floats", weights=True)
    mine = run(WAYS[way](tmp_path), tmp_path, "mine", weights=True)
    for reference in (wanted, floats):
        report = ld.compare(reference, mine, progress=False)
        assert report.verdict == "within_noise"
        assert not report.findings


def test_activations_clipped_by_a_wrong_calibration_are_found(tmp_path):
    wanted = golden(tmp_path, weights=True)
    mine = run(static(tmp_path, scale=0.1), tmp_path, "mine", weights=True)
    report = ld.compare(wanted, mine, progress=False)
    assert report.verdict == "diverged"
    assert report.findings[0].path == "inp"


def test_a_wrong_scale_of_a_weight_is_found(tmp_path):
    wanted = golden(tmp_path, weights=True)
    model = onnx.load(static(tmp_path))
    (scale,) = (i for i in model.graph.initializer if i.name == "ups.1.weight_scale")
    values = onnx.numpy_helper.to_array(scale) * np.float32(1.5)
    scale.CopyFrom(onnx.numpy_helper.from_array(values, scale.name))
    onnx.save(model, tmp_path / "wrong.onnx")
    mine = run(tmp_path / "wrong.onnx", tmp_path, "mine", weights=True)
    report = ld.compare(wanted, mine, progress=False)
    assert report.verdict == "diverged"
    assert report.findings[0].path == "ups.1"


@pytest.mark.parametrize("way", ["qdq", "dynamic"])
def test_without_weights_the_report_says_how_to_record_them(way, tmp_path):
    wanted = golden(tmp_path)
    report = ld.compare(wanted, run(WAYS[way](tmp_path), tmp_path, "mine"), progress=False)
    assert report.verdict == "incomparable"
    assert "Record both runs with weights=True (in a shell: --weights)." in str(report)


def test_a_session_in_float16_is_recorded_as_it_runs(tmp_path):
    convert = pytest.importorskip("onnxruntime.transformers.float16")
    golden(tmp_path)
    model = convert.convert_float_to_float16(onnx.load(tmp_path / "float.onnx"), keep_io_types=True)
    onnx.save(model, tmp_path / "half.onnx")
    mine = run(tmp_path / "half.onnx", tmp_path, "mine")
    assert not mine.meta["problems"]


def test_a_cast_between_two_nodes_of_a_module_is_in_the_module():
    nodes = [
        ExportedNode("pow", "Pow", ["x"], ["a"], module="layers.0.norm"),
        ExportedNode("cast", "Cast", ["a"], ["b"]),
        ExportedNode("mean", "ReduceMean", ["b"], ["c"], module="layers.0.norm"),
        ExportedNode("out", "Cast", ["c"], ["d"]),
        ExportedNode("up", "Gemm", ["d"], ["e"], module="layers.0.up"),
    ]
    placed = PlacedGraph(nodes, {}, {}, {"layers.0.norm", "layers.0.up"}, {})
    assert placed.modules[1] == "layers.0.norm"
    assert placed.modules[3] == "layers.0"
