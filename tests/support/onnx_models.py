"""Build ONNX models node by node, and run them with onnxruntime."""

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

import mpidl as dl


def node(operator, inputs, output, **attributes):
    """Return a node; `inputs` are names separated by spaces."""
    return helper.make_node(operator, inputs.split(), [output], output, **attributes)


def model(nodes, constants, image_shape, output="y", opset=20, sizes=("N",), **keywords):
    """Return a model whose input x has images of shape `image_shape`."""
    tensors = [numpy_helper.from_array(np.asarray(a), name) for name, a in constants.items()]
    float32 = TensorProto.FLOAT
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", float32, [*sizes, *image_shape])],
        [helper.make_tensor_value_info(output, float32, None)],
        tensors,
    )
    opsets = [helper.make_opsetid("", opset), *keywords.pop("opsets", ())]
    proto = helper.make_model(graph, opset_imports=opsets, ir_version=9, **keywords)
    inferred = onnx.shape_inference.infer_shapes(proto).graph.output[0].type
    proto.graph.output[0].type.CopyFrom(inferred)
    if not inferred.tensor_type.HasField("shape"):
        proto.graph.output[0].type.tensor_type.shape.SetInParent()
    return proto


def saved(path, *args, **keywords):
    """Write `model(...)` to a path and return the path."""
    path.write_bytes(model(*args, **keywords).SerializeToString())
    return path


def session_scores(path, images):
    """Return the scores that onnxruntime computes for images (N, C, H, W)."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), options, ["CPUExecutionProvider"])
    (name,) = (value.name for value in session.get_inputs())
    return session.run(None, {name: images.astype(np.float32)})[0]


def scores(net, images):
    """Return the scores of a network, which normalizes the images."""
    values = images.astype(np.float32)
    if net.normalization is not None:
        values = net.normalization(images)
    return net(dl.from_images(values, dl.share(len(values), dl.OneRank()))).local()


def difference(net, path, images):
    """Return the largest difference from onnxruntime's scores, relative to the largest score."""
    expected, actual = session_scores(path, images), scores(net, images)
    assert actual.shape == expected.shape
    return abs(actual - expected).max() / max(abs(expected).max(), 1e-3)


def without_description(path, target):
    """Copy a file without its metadata, so that only its graph is read."""
    proto = onnx.load(path)
    del proto.metadata_props[:]
    target.write_bytes(proto.SerializeToString())
    return target


def imported_network(folder):
    """Return a network for 1x6x6 images and 3 classes, from an ONNX file without a description."""
    layers = [
        *(dl.Pad2D(1, 0.5), dl.Conv2D(3, 4, stride=2), dl.BatchNorm(), dl.Clip(0, 6)),
        *(dl.Conv2D(3, 4, padding=1, groups=4, bias=False), dl.BatchNorm(), dl.PReLU()),
        *(dl.Conv2D(1, 6), dl.BatchNorm(), dl.ReLU(), dl.HardSwish()),
        *(dl.AveragePool2D(3, 2, 1, count_padding=False), dl.Swish(), dl.HardSigmoid()),
        *(dl.Dense(5), dl.PReLU(shared=True), dl.Dense(3), dl.Softmax()),
    ]
    path = folder / "described.onnx"
    dl.save_onnx(dl.Network(layers, (1, 6, 6), seed=3), path)
    return dl.load_onnx(without_description(path, folder / "imported.onnx"))
