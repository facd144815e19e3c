"""Suggest mpidl's equivalents for names in MATLAB, PyTorch, Keras and scikit-learn.

For example, `mpidl.trainNetwork` and `net.fit` raise an AttributeError whose message names
`dl.train`. docs/matlab.md has the names in MATLAB in tables.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, ParamSpec, TypeVar

from mpidl.text import did_you_mean

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_RANKS = "`mpirun -n N python FILE.py`, or dl.launch(function, ranks=N) within Python"
_GRADIENT = "dl.value_and_grad(loss)(net, images, labels), where loss(net, images, labels) is yours"
_NETWORK = "dl.Network([...], input_shape); layers name their inputs (after=, inputs=)"
_TRAIN = "dl.train(net, images, dl.TrainingOptions(...))"


# In the tables, a key may be several names.

# {name in MATLAB: equivalent in mpidl}. Code within a sentence is between back quotes.
NAMES: dict[str, str] = {
    # training
    "trainNetwork": _TRAIN,
    "trainnet": "dl.train(net, images, dl.TrainingOptions(loss=...))",
    "trainingOptions": "dl.TrainingOptions(epochs=30, batch_size=128, ...)",
    "trainingProgressMonitor": 'world.report(...) in dl.report_to("RUN", world=world), which '
    "`python -m mpidl.monitor RUN` shows",
    "animatedline": "`progress.png`, `python -m mpidl.monitor RUN`, or "
    'dl.launch(function, plots="live") in a notebook',
    "experimentManager": "dl.sweep(function, trials)",
    # custom loops
    "dlarray": "not needed: dl.MinibatchQueue delivers values per image, and "
    "dl.from_images(array, dl.share(count, world)) converts an array",
    "dlfeval dlgradient": _GRADIENT,
    "dlaccelerate": "not needed: dl.train records the step on a GPU",
    "forward": "net(images)",
    "extractdata": "x.local(), the array of this rank's images",
    "focalCrossEntropy": "dl.softmax_cross_entropy(scores, labels, focal_gamma=2)",
    "generalizedDice": "dl.dice_loss(scores, labels, generalized=True), which is 1 minus the mean "
    "similarity over the images",
    "crossentropy": "dl.softmax_cross_entropy(scores, labels), or "
    "dl.cross_entropy(probabilities, targets)",
    "mse": "dl.mean_squared_error(outputs, targets)",
    "l1loss": "dl.mean_absolute_error(outputs, targets)",
    "onehotencode": "dl.one_hot(labels, classes)",
    "onehotdecode": "scores.argmax(axis=1) of an array, or dl.classify(net, images, names=True)",
    "dlupdate": "optimizer(net.parameters, gradients), where optimizer = dl.SGDM(...)",
    "sgdmupdate": "dl.SGDM(learning_rate=0.01, momentum=0.9)",
    "adamupdate": "dl.Adam(learning_rate=0.001)",
    "rmspropupdate": "dl.RMSProp(learning_rate=0.001)",
    "aggregateState": "not needed: normalization uses the statistics of the whole mini-batch",
    "fullyconnect": "dl.dense(x, weight, bias)",
    "dlconv": "dl.conv2d(x, weight, bias)",
    "dltranspconv": "dl.transposed_conv2d(x, weight, bias)",
    "maxpool": "dl.max_pool2d(x, size, stride=...)",
    "avgpool": "dl.average_pool2d(x, size, stride=...)",
    "leakyrelu": "dl.leaky_relu(x, scale)",
    "crosschannelnorm": "dl.cross_channel_norm(x, window)",
    "groupnorm": "dl.group_norm(x, gamma, beta, groups=...)",
    "instancenorm": "dl.instance_norm(x, gamma, beta)",
    "layernorm": "dl.layer_norm(x, gamma, beta)",
    # data
    "imageDatastore": "dl.ImageFolder(folder, world)",
    "augmentedImageDatastore": "dl.ImageFolder(folder, world, preprocess=dl.Preprocess(size=...))",
    "imageDataAugmenter": "dl.Augmenter(reflect_x=True, translate_x=4, ...)",
    "denoisingImageDatastore": "dl.data.combined(noisy, clean), or a class derived from "
    "dl.data.Datastore that adds the noise",
    "pixelLabelImageDatastore pixelLabelDatastore": "dl.data.combined(images, masks, "
    "pixel_labels=True)",
    "arrayDatastore": "dl.ArrayDatastore(images, labels)",
    "combine": "dl.data.combined(images, targets)",
    "transform": "images.transform(function)",
    "splitEachLabel": "images.split(0.9), or images.split(0.8, 0.1) for three parts",
    "readtable": "dl.data.ImageTable(path, world), for a table of image files",
    "cvpartition": "images.kfold(5), pairs of training and validation images",
    "crossval": "images.kfold(5), or `folds = 5` in the file of mpidl.sweep",
    "countEachLabel": "images.class_counts()",
    "categories": "images.classes",
    "partition": "images.subset(range(rank, len(images), ranks)); not needed with "
    "dl.MinibatchQueue",
    "minibatchqueue": "dl.MinibatchQueue(images, batch_size, world=world)",
    "hasdata next reset": "`for images, labels in queue.epoch(epoch)` of "
    "dl.MinibatchQueue(images, batch_size)",
    "shuffle": 'shuffle="every-epoch" of dl.MinibatchQueue or dl.TrainingOptions',
    "read": "images.read(indices)",
    "readall": "images.read(range(len(images)))",
    # networks
    "dlnetwork layerGraph dagnetwork SeriesNetwork assembleNetwork": _NETWORK,
    "addLayers": "net.with_layers([...]), or dl.Network([...], input_shape)",
    "connectLayers": "`inputs=` of dl.Add, dl.Concat and custom layers, `after=` of other layers",
    "analyzeNetwork": "dl.analyze(net)",
    "replaceLayer": 'net.replace_layers({"fc": dl.Dense(10)})',
    "freezeWeights": 'net.freeze("conv1", ...)',
    "setLearnRateFactor": 'net["conv1"].weight_learn_rate_factor = 0.0',
    "setL2Factor": 'net["conv1"].weight_l2_factor = 0.0',
    "imageInputLayer": "the input_shape of dl.Network; normalization= of dl.TrainingOptions",
    "convolution2dLayer": "dl.Conv2D(size, filters, stride=1, padding=0)",
    "groupedConvolution2dLayer": "dl.Conv2D(size, filters, groups=...)",
    "transposedConv2dLayer": "dl.TransposedConv2D(size, filters, stride=1, cropping=0)",
    "batchNormalizationLayer": "dl.BatchNorm()",
    "crossChannelNormalizationLayer": "dl.CrossChannelNorm(window)",
    "groupNormalizationLayer": "dl.GroupNorm(groups)",
    "instanceNormalizationLayer": "dl.InstanceNorm()",
    "layerNormalizationLayer": "dl.LayerNorm(), over the channels of each pixel",
    "reluLayer": "dl.ReLU()",
    "leakyReluLayer": "dl.LeakyReLU(scale)",
    "clippedReluLayer": "dl.Clip(0, 6)",
    "preluLayer": "dl.PReLU()",
    "geluLayer": "dl.GELU()",
    "swishLayer": "dl.Swish()",
    "tanhLayer": "dl.Tanh()",
    "sigmoidLayer": "dl.Sigmoid()",
    "maxPooling2dLayer": "dl.MaxPool2D(size, stride)",
    "averagePooling2dLayer": "dl.AveragePool2D(size, stride)",
    "globalAveragePooling2dLayer": "dl.GlobalAveragePool2D()",
    "adaptiveAveragePooling2dLayer": "dl.AdaptiveAveragePool2D(size)",
    "resize2dLayer": "dl.Resize2D(size), or dl.Resize2D(scale=2)",
    "dlresize": "dl.resize2d(x, size), or dl.resize2d(x, scale=2)",
    "lstmLayer": 'dl.LSTM(units), or dl.LSTM(units, returns="last")',
    "gruLayer": 'dl.GRU(units), or dl.GRU(units, returns="last")',
    "bilstmLayer": "dl.Concat of dl.LSTM(units) and dl.LSTM(units, reverse=True)",
    "predictAndUpdateState classifyAndUpdateState": "dl.lstm(x, ..., state=state) and dl.gru, "
    "which return the new state",
    "sequenceInputLayer": "the input_shape of dl.Network, (1, steps, features)",
    "dropoutLayer": "dl.Dropout(0.5)",
    "fullyConnectedLayer": "dl.Dense(outputs)",
    "additionLayer": "dl.Add(inputs=(...))",
    "multiplicationLayer": "dl.Multiply(inputs=(...))",
    "depthConcatenationLayer": "dl.Concat(inputs=(...))",
    "softmaxLayer": "dl.Softmax(), which dl.train and dl.predict do not need",
    "classificationLayer regressionLayer": "the network's scores and a loss of "
    "dl.TrainingOptions(loss=...)",
    "imagePretrainedNetwork": "dl.load_weights(dl.nn.zoo.resnet50(), file)",
    "alexnet resnet18 resnet50 vgg16 vgg19": "dl.load_weights(dl.nn.zoo.{name}(), file)",
    "squeezenet": "dl.load_weights(dl.nn.zoo.squeezenet1_1(), file)",
    "mobilenetv2": "dl.load_weights(dl.nn.zoo.mobilenet_v2(), file)",
    "jitterColorHSV": "dl.Augmenter(brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1)",
    "randomAffine2d imwarp": "dl.Augmenter(rotation=20, scale_x=(0.8, 1.2))",
    "randomWindow2d imcrop": "dl.Augmenter(resized_crop=(224, 224))",
    "imresize": "dl.Preprocess(size=(224, 224))",
    # workers and devices
    "parpool spmd": _RANKS,
    "parcluster": "`sbatch run/train.slurm`, or `mpirun -n N python FILE.py`",
    "setenv": "os.environ[name] = value, or `export NAME=value` before mpirun",
    "gcp": "dl.World()",
    "parfor parfeval": "dl.sweep(function, trials), one training run per rank or group of ranks",
    "fetchOutputs": "the list that dl.sweep(function, trials) returns",
    "batch": "`sbatch run/train.slurm`",
    "spmdIndex labindex": "dl.World().rank, from 0",
    "spmdSize numlabs": "dl.World().size",
    "spmdBarrier labBarrier": "world.barrier()",
    "spmdPlus gplus": "world.gplus(value)",
    "spmdReduce gop": 'world.gop("max", value)',
    "spmdBroadcast labBroadcast": "world.broadcast(value)",
    "gather": "world.gather(value)",
    "spmdCat gcat": "world.allgather(value), a list of the values of all ranks",
    "afterEach": "world.after_each(handler)",
    "send": "world.send(data)",
    "DataQueue": "world.send(data) and world.after_each(handler)",
    "canUseGPU": 'dl.World().use_device("auto")',
    "gpuDevice": 'gpus="1" of dl.TrainingOptions, or world.use_device("gpu", "1")',
    "gpuDeviceCount": "`python -m mpidl.info`, which lists the GPUs",
    "gpuArray": 'not needed: after world.use_device("gpu") dl.MinibatchQueue uploads images',
    # after training
    "gradCAM": "dl.explain(net, images, target=label)",
    "occlusionSensitivity": 'dl.explain(net, images, method="occlusion", target=label)',
    "minibatchpredict": "dl.predict(net, images)",
    "scores2label": "dl.classify(net, images, names=True)",
    "testnet": "dl.evaluate(net, images)",
    "confusionmat": "dl.confusion_matrix(labels, predicted)",
    "confusionchart": "dl.evaluate(net, images, confusion=True).confusion",
    "rmse": "dl.regression_errors(net, images).rmse",
    "exportONNXNetwork exportNetworkToONNX": "dl.save_onnx(net, path)",
    "importONNXNetwork importNetworkFromONNX": "dl.load_onnx(path)",
    "importNetworkFromPyTorch": "dl.load_weights(net, path), from a safetensors file",
    "save": "dl.save_model(path, net)",
    "load": "dl.load_model(path)",
}

# {name in PyTorch or Keras: equivalent in mpidl}
LIBRARY_NAMES: dict[str, str] = {
    "Sequential Model Module": _NETWORK,
    "Input InputLayer": "the input_shape of dl.Network",
    "Linear": "dl.Dense(outputs)",
    "Conv2DTranspose ConvTranspose2d": "dl.TransposedConv2D(size, filters, stride=...)",
    "DepthwiseConv2D": "dl.Conv2D(size, channels, groups=channels)",
    "Activation": "a layer, such as dl.ReLU()",
    "SiLU SiLu": "dl.Swish()",
    "ReLU6 Hardtanh": "dl.Clip(low, high), such as dl.Clip(0, 6)",
    "GlobalAveragePooling2D": "dl.GlobalAveragePool2D()",
    "AdaptiveAvgPool2d": "dl.AdaptiveAveragePool2D(size)",
    "Upsample UpSampling2D UpsamplingNearest2d Resizing": "dl.Resize2D(size), or "
    "dl.Resize2D(scale=2)",
    "LocalResponseNorm": "dl.CrossChannelNorm(window)",
    "ZeroPadding2D": "dl.Pad2D(padding)",
    "DataLoader DistributedSampler": "dl.MinibatchQueue(images, batch_size)",
    "TensorDataset": "dl.ArrayDatastore(images, labels)",
    "CrossEntropyLoss": "dl.softmax_cross_entropy(scores, labels), or dl.CrossEntropy(...) as the "
    "loss of dl.TrainingOptions",
    "BCEWithLogitsLoss": "dl.sigmoid_cross_entropy(scores, targets)",
    "MSELoss": "dl.mean_squared_error(outputs, targets)",
    "SGD": "dl.SGDM(learning_rate=0.01, momentum=0.9)",
    "optim": "an optimizer, such as dl.SGDM or dl.AdamW",
    "DistributedDataParallel init_process_group": _RANKS,
    "no_grad": "not needed: only dl.value_and_grad computes gradients",
    "autocast": 'precision="bf16" of dl.TrainingOptions, or dl.configure(precision="bf16")',
    "manual_seed set_seed": "seed= of dl.Network and dl.TrainingOptions",
    "fit": _TRAIN,
    "summary": "dl.analyze(net)",
}

# {attribute of a network in another library: equivalent in mpidl}
NETWORK_ATTRIBUTES: dict[str, str] = {
    "fit partial_fit train_on_batch": _TRAIN,
    "compile": "dl.TrainingOptions(solver=..., loss=..., metrics=...), an argument of dl.train",
    "train": "dl.train(net, images, dl.TrainingOptions(...)); networks have no modes to switch",
    "eval": "not needed: only training uses dropout and the statistics of mini-batches",
    "evaluate score test": "dl.evaluate(net, images)",
    "predict_proba predict_on_batch": "dl.predict(net, images)",
    "predict_classes": "dl.classify(net, images)",
    "decision_function": "net.logits(images), before the softmax",
    "forward": "net(images), or dl.predict(net, images) for data sets and arrays",
    "register_forward_hook": 'dl.activations(net, images, "conv1")',
    "summary": "print(net), or dl.analyze(net) with memory and operations",
    "plot plot_model": "dl.analyze(net)",
    "named_parameters weights get_weights variables Learnables": "net.parameters, a dict of "
    'arrays such as net.parameters["conv1.weight"]',
    "buffers named_buffers": "net.state, a dict of arrays",
    "trainable_weights trainable_variables": "net.trainable, a dict of arrays",
    "set_weights": "net.parameters = {**net.parameters, ...}",
    "state_dict": "net.parameters and net.state, or dl.save_weights(net, path)",
    "load_state_dict load_weights": "dl.load_weights(net, path)",
    "save_weights": "dl.save_weights(net, path)",
    "save": "dl.save_model(path, net)",
    "get_config to_json": "net.spec()",
    "modules named_modules children named_children": "net.layers, a list",
    "get_layer get_submodule": 'net["conv1"]',
    "add append": "net.append_layer(layer), or dl.Network([...], shape)",
    "requires_grad_": "net.freeze(...) and net.unfreeze(...), with the names of layers",
    "backward zero_grad": _GRADIENT,
    "cuda cpu": 'world.use_device("gpu") or world.use_device("cpu"), after which dl.train moves '
    "networks",
    "half float double": "not needed: the learnables are float32",
    "bfloat16": 'not needed: the learnables are float32, and dl.configure(precision="bf16") '
    "computes in bfloat16",
    "classes_": "net.classes",
    "InputSize": "net.input_shape",
    "Connections": "net.reads",
}

# {argument in MATLAB or another library, in lower case without underscores: argument in mpidl}
ARGUMENTS = {
    "kernelsize poolsize filtersize": "size",
    "outchannels numfilters": "filters",
    "outfeatures units": "outputs",
    "strides": "stride",
    "lr": "learning_rate",
    "weightdecay": "l2",
    "dilationrate dilationfactor": "dilation",
    "usebias": "bias",
    "eps": "epsilon",
    "negativeslope": "scale",
    "colorpreprocessing": "colour",
    "classnames": "classes",
    "minibatchfcn": "function",
    "minibatchsize readsize": "batch_size",
    "numworkers preprocessingenvironment dispatchinbackground": "workers",
    "droplast": "partial_minibatch",
    "outputsize": "size",
    "momentum": "gradient_decay_factor",
    "readfcn": "preprocess",
    "hiddensize numhiddenunits": "units",
    "outputmode": "returns",
    "gobackwards": "reverse",
}
# {argument in another library without an equivalent in mpidl: explanation}. If an explanation
# begins with an argument, such as "decay= is", it is for functions that have this argument.
REMARKS = {
    "includesubfolders": "sub-folders are always included",
    "labelsource": "the label of an image is always the name of its sub-folder",
    "inchannels infeatures numfeatures numchannels inputdim": "the network infers the shape of "
    "the input",
    "momentum": "decay= is the weight of a mini-batch in the moving averages: PyTorch's momentum, "
    "or 1 minus that of Keras",
    "epochs maxepochs batchsize learningrate validationdata callbacks certify": "dl."
    "TrainingOptions and the hooks of dl.train set how a network is trained",
    "params": "the optimizer receives the learnables in each step",
    "activation": "an activation is a layer, such as dl.ReLU()",
    "returnsequences": 'returns="sequence" is the default, and "last" returns the last step',
    "bidirectional": "a Concat of a layer and of one with reverse=True is bidirectional",
    "numlayers": "each layer is a layer of the network",
    "batchfirst": "images are (N, C, H, W), and the rows of an image are the steps",
    "stateful returnstate": "dl.lstm and dl.gru return the state, and start with one",
    "inplace": "the network decides which layers share memory",
    "fileextensions": "PNG, JPEG, BMP and TIFF files are read, and all other files are ignored",
    "minibatchformat": "images are (N, C, H, W)",
    "dispatchinbackground": "`workers=` and `prefetch=` of dl.TrainingOptions set this",
    "outputcast": "images are float32",
    "outputasdlarray": "the values of a mini-batch can always be differentiated",
    "acceleration": "dl.train records the step on a GPU",
    "executionenvironment outputenvironment": "world.use_device(...) selects CPUs or GPUs",
}


def _split_keys(table: dict[str, str]) -> None:
    """Give each name of a key an entry of its own, in whose text {name} stands for the name."""
    for names in [key for key in table if " " in key]:
        text = table.pop(names)
        table.update({name: text.replace("{name}", name) for name in names.split()})


for _table in (NAMES, LIBRARY_NAMES, NETWORK_ATTRIBUTES, ARGUMENTS, REMARKS):
    _split_keys(_table)


def missing_name(name: str) -> NoReturn:
    """Raise AttributeError for a name that `mpidl` does not define. This is `mpidl.__getattr__`.

    The message contains the equivalent of a name in another library, or else the most similar name.
    """
    if name in NAMES:
        text = f"mpidl.{name}: MATLAB's {name} is {NAMES[name]}"
        raise AttributeError(text, name=name, obj=None)
    _refuse(f"module 'mpidl' has no attribute {name!r}", name, LIBRARY_NAMES, sys.modules["mpidl"])


def missing_attribute(net: object, name: str) -> NoReturn:
    """Raise AttributeError for an attribute that a network lacks, as `missing_name` does."""
    _refuse(f"{type(net).__name__} has no attribute {name!r}", name, NETWORK_ATTRIBUTES, net)


def _refuse(text: str, name: str, equivalents: Mapping[str, str], owner: object) -> NoReturn:
    if name in equivalents:
        verb = "" if equivalents[name].startswith("not needed") else "use "
        text += f": {verb}{equivalents[name]}"
    elif not name.startswith("_"):
        text += did_you_mean(name, [n for n in dir(owner) if not n.startswith("_")])
    # With an `obj`, Python would append its own suggestion.
    raise AttributeError(text, name=name, obj=None)


def explain_arguments(
    function: Callable[Arguments, Result],
    advice: str = "",
    passed_to: Callable[..., Any] | None = None,
) -> Callable[Arguments, Result]:
    """Make a function explain unknown keywords, such as MATLAB's, and superfluous arguments.

    The function then raises a TypeError that suggests the equivalent or most similar argument, or
    says why mpidl does not need the argument. If too many arguments are given by position, the
    TypeError lists the arguments of the function, and ends with `advice`. If the function passes
    its `**keywords` to another function, `passed_to`, its signature has the keywords of this one.
    """
    signature = inspect.signature(function)
    if passed_to is not None:
        passed = inspect.signature(passed_to).parameters.values()
        listed = [p for p in signature.parameters.values() if p.kind != p.VAR_KEYWORD]
        listed += [p for p in passed if p.kind == p.KEYWORD_ONLY]
        signature = signature.replace(parameters=listed)
    parameters = dict(signature.parameters)
    owner = function.__qualname__.removesuffix(".__init__")
    skipped = owner != function.__qualname__  # the number of arguments for `self`
    by_name = [name for name, p in parameters.items() if p.kind == p.KEYWORD_ONLY]
    by_position = [name for name in parameters if name not in by_name]
    expected = f"{owner}({', '.join(by_position[skipped:])})"
    names = ", ".join(f"{name}=" for name in by_name if not name.endswith("_factor"))

    @functools.wraps(function)
    def explained(*args: Arguments.args, **keywords: Arguments.kwargs) -> Result:
        for name in keywords:
            if name not in parameters:
                raise TypeError(f"{owner}: unknown argument {name}{_hint(name, parameters)}")
        if len(args) > len(by_position):
            values = ", ".join(map(repr, args[skipped:]))
            rest = f"other arguments by name ({names})" + (f"; {advice}" if advice else "")
            raise TypeError(f"{owner}({values}): expected {expected}, and {rest}")
        return function(*args, **keywords)

    vars(explained)["__signature__"] = signature
    kinds = {p.name: p.annotation for p in parameters.values() if p.annotation is not p.empty}
    explained.__annotations__ = kinds | {"return": signature.return_annotation}
    return explained


def _hint(name, parameters):
    plain = name.replace("_", "").lower()
    similar = {ARGUMENTS.get(plain), *(p for p in parameters if p.replace("_", "") == plain)}
    remark = REMARKS.get(plain, "")
    subject, equals, _ = remark.partition("= ")
    is_for_others = equals and subject.isidentifier() and subject not in parameters
    if remark and not is_for_others and similar.isdisjoint(parameters):
        return f": {remark}"
    return did_you_mean(name, parameters, ARGUMENTS)
