"""Write small data files of every format, byte by byte or with the usual libraries."""

import h5py
import numpy as np
import scipy.io

CIFAR_NAMES = "airplane automobile bird cat deer dog frog horse ship truck".split()


def _write_cifar(folder, names, count, label_counts, seed):
    """Write CIFAR's binary files of random images, and return {file name: (*labels, pixels)}."""
    folder.mkdir(parents=True, exist_ok=True)
    arrays, random = {}, np.random.default_rng(seed)
    for name in names:
        labels = [random.integers(0, classes, count, dtype=np.uint8) for classes in label_counts]
        pixels = random.integers(0, 256, (count, 3, 32, 32), dtype=np.uint8)
        records = np.hstack([np.stack(labels, axis=1), pixels.reshape(count, -1)])
        (folder / name).write_bytes(records.tobytes())
        arrays[name] = *labels, pixels
    return arrays


def cifar10(folder, per_file=3, names=True):
    """Write CIFAR-10's binary files, and return {file name: (labels, pixels (n, 3, 32, 32))}."""
    files = [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]
    arrays = _write_cifar(folder, files, per_file, [10], seed=10)
    if names:
        text = "".join(f"{name}\n" for name in CIFAR_NAMES)
        (folder / "batches.meta.txt").write_text(text + "\n")
    return arrays


def cifar100(folder, n=4):
    """Write CIFAR-100's binary files, and return {file name: (coarse, fine, pixels)}."""
    arrays = _write_cifar(folder, ("train.bin", "test.bin"), n, [20, 100], seed=100)
    for kind, count in (("coarse", 20), ("fine", 100)):
        names = "".join(f"{kind} {i}\n" for i in range(count))
        (folder / f"{kind}_label_names.txt").write_text(names)
    return arrays


def hdf5(path, images, labels=None, classes=None, layout=None, targets=None, **options):
    """Write an HDF5 file in the layout that h5py users usually choose."""
    with h5py.File(path, "w") as file:
        dataset = file.create_dataset("images", data=images, **options)
        if layout is not None:
            dataset.attrs["layout"] = layout
        if labels is not None:
            file["labels"] = labels
            if classes is not None:
                file["labels"].attrs["classes"] = classes
        if targets is not None:
            file["targets"] = targets
    return path


def mat5(path, compressed=True, **variables):
    """Write a .mat file of version 5 as `save -v7` does, or as -v6 does if not `compressed`."""
    scipy.io.savemat(path, variables, do_compression=compressed, oned_as="column")
    return path


def cells(*texts):
    """Return a cell array of character vectors for `mat5`."""
    array = np.empty((1, len(texts)), object)
    array[0, :] = texts
    return array


def mat73(path, **variables):
    """Write a .mat file of version 7.3: MATLAB's header, then HDF5 with MATLAB's axis order.

    A list of texts becomes a cell array.
    """
    kinds = {"u1": "uint8", "f8": "double", "f4": "single", "i4": "int32", "u4": "uint32"}
    with h5py.File(path, "w", userblock_size=512) as file:
        for name, value in variables.items():
            if isinstance(value, list):
                group = file.require_group("#refs#")
                references = []
                for text in value:
                    codes = np.frombuffer(text.encode("utf-16-le"), np.uint16)[:, None]
                    dataset = group.create_dataset(f"{name}{len(references)}", data=codes)
                    dataset.attrs["MATLAB_class"] = np.bytes_("char")
                    references.append(dataset.ref)
                dataset = file.create_dataset(name, (len(value), 1), h5py.ref_dtype)
                dataset[:, 0] = references
                dataset.attrs["MATLAB_class"] = np.bytes_("cell")
                continue
            value = np.asarray(value)
            kind = kinds[value.dtype.str[1:]]
            chunks = (1, *value.shape[-2::-1]) if value.ndim > 2 else None
            dataset = file.create_dataset(
                name, data=value.T, chunks=chunks, compression=chunks and "gzip"
            )
            dataset.attrs["MATLAB_class"] = np.bytes_(kind)
    head = b"MATLAB 7.3 MAT-file, Platform: GLNXA64".ljust(124, b" ") + b"\x00\x02IM"
    with open(path, "r+b") as file:
        file.write(head)
    return path


def matlab(images):
    """Return images (N, C, H, W) in MATLAB's order, H x W x C x N."""
    return images.transpose(2, 3, 1, 0)
