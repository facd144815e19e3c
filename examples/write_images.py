"""Write some of the embedded digits as a folder of images, for docs/tutorial.md.

    python examples/write_images.py [FOLDER] [IMAGES PER CLASS] [FIRST IMAGE OF EACH CLASS]

FOLDER/images has a sub-folder of PNG files for each class, as `--data` expects. The images of a
class are numbered from 0. By default, the first 200 images are written. FOLDER/new has 20 more
images without labels, whose names begin with the digit in the image.
"""

import sys
from pathlib import Path

import numpy as np
from PIL import Image

import mpidl as dl


def main(folder="first-hour", per_class=200, first=0):
    digits, root = dl.data.digits(), Path(folder)
    for label, name in enumerate(digits.classes):
        (indices,) = np.nonzero(digits.labels == label)
        labelled, unlabelled = indices[int(first) :][: int(per_class)], indices[-2:]
        paths = [root / "images" / name / f"{name}-{i:05d}.png" for i in labelled]
        paths += [root / "new" / f"{name}-{i:05d}.png" for i in unlabelled]
        pixels = digits.read([*labelled, *unlabelled])
        for path, image in zip(paths, pixels, strict=True):
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image[0]).save(path)
    print(f"{root}/images: {10 * int(per_class)} images; {root}/new: 20 images")


if __name__ == "__main__":
    main(*sys.argv[1:])
