// A loss of the overlap of regions, in double precision, and its gradient; see OverlapRule in
// mpidl/backends/training_interface.py.
//
// p (images, pixels, classes) are probabilities, labels (images, pixels) are classes, and valid is
// the number of images in this rank's share. A single class is labelled 1.

__device__ __forceinline__ bool is_valid(int label, int classes) {
    return label >= 0 && label < (classes > 1 ? classes : 2);
}

__device__ __forceinline__ bool is_labelled(int label, int class_number, int classes) {
    return label == class_number + (classes == 1);
}

// sums (images, classes, 3): the sums over the pixels of p g, p p (or p), and g, where g is 1 if
// the pixel has the class, else 0. A block of threads processes one class of an image.
extern "C" __global__ void __launch_bounds__(256)
    overlap_sums(const double* __restrict__ p, const int* __restrict__ labels,
                 const int* __restrict__ valid, double* __restrict__ sums, int is_squared,
                 int classes, int pixels) {
    __shared__ double of_threads[3][256];
    const long long image = blockIdx.x / classes;
    const int own = blockIdx.x % classes;
    double overlap = 0.0, powers = 0.0, labelled = 0.0;
    if (image < *valid) {
        for (int pixel = threadIdx.x; pixel < pixels; pixel += blockDim.x) {
            const long long row = image * pixels + pixel;
            const int label = labels[row];
            if (!is_valid(label, classes)) continue;
            const double chance = p[row * classes + own];
            powers += is_squared ? chance * chance : chance;
            if (is_labelled(label, own, classes)) overlap += chance, labelled += 1.0;
        }
    }
    of_threads[0][threadIdx.x] = overlap;
    of_threads[1][threadIdx.x] = powers;
    of_threads[2][threadIdx.x] = labelled;
    for (int half = blockDim.x / 2; half; half /= 2) {
        __syncthreads();
        if ((int)threadIdx.x < half)
            for (int i = 0; i < 3; i++)
                of_threads[i][threadIdx.x] += of_threads[i][threadIdx.x + half];
    }
    __syncthreads();
    if (threadIdx.x < 3) sums[(long long)blockIdx.x * 3 + threadIdx.x] = of_threads[threadIdx.x][0];
}

// Returns the weight v of a class in the generalized loss. smallest: the size of the smallest class
// of the image that has pixels, or 1 if all classes are empty.
__device__ __forceinline__ double factor_of(const double* weights, int class_number,
                                            double labelled, double smallest) {
    const double pixels = labelled > 0.0 ? labelled : smallest;
    return (weights ? weights[class_number] : 1.0) / (pixels * pixels);
}

// losses (images): the loss of each image, or 0 for unused images. slopes (images, classes, 2): the
// derivative with respect to a pixel's p is p (or 1) times slope 1, plus slope 0 if the pixel has
// the class.
extern "C" __global__ void __launch_bounds__(256)
    overlap_losses(const double* __restrict__ sums, const int* __restrict__ valid,
                   const double* __restrict__ weights, double* __restrict__ losses,
                   double* __restrict__ slopes, double smooth, int generalized, int is_squared,
                   double factor_above, double factor_below, double chances, double labels,
                   int classes, int images) {
    // the denominator of a class's similarity, without smoothing
    auto below_of = [=](const double* own) {
        return chances * own[1] + labels * own[2] + factor_below * own[0];
    };
    double all_weights = 0.0;
    for (int c = 0; c < classes; c++) all_weights += weights ? weights[c] : 1.0;
    EACH_INDEX(image, images) {
        const double* own = sums + (long long)image * classes * 3;
        double* slope = slopes + (long long)image * classes * 2;
        double above = 0.0, below = 0.0, loss = 0.0, smallest = 0.0;
        for (int c = 0; generalized && c < classes; c++) {
            const double labelled = own[3 * c + 2];
            if (labelled > 0.0 && (smallest == 0.0 || labelled < smallest)) smallest = labelled;
        }
        if (smallest == 0.0) smallest = 1.0;
        for (int c = 0; generalized && c < classes; c++) {
            const double labelled = own[3 * c + 2];
            const double factor = factor_of(weights, c, labelled, smallest);
            above += factor * (factor_above * own[3 * c]);
            below += factor * below_of(own + 3 * c);
        }
        for (int c = 0; c < classes; c++) {
            const double labelled = own[3 * c + 2];
            double factor = (weights ? weights[c] : 1.0) / all_weights;
            if (generalized)
                factor = factor_of(weights, c, labelled, smallest);
            else
                above = factor_above * own[3 * c], below = below_of(own + 3 * c);
            const double smoothed = below + smooth;
            const double inverse = smoothed == 0.0 ? 0.0 : 1.0 / smoothed;
            const double similarity = (above + smooth) * inverse;
            const double missing = smoothed == 0.0 ? 0.0 : 1.0 - similarity;  // NaN stays NaN
            loss = generalized ? missing : loss + factor * missing;
            slope[2 * c] = (factor_below * similarity - factor_above) * factor * inverse;
            slope[2 * c + 1] = (is_squared ? 2.0 : 1.0) * chances * factor * similarity * inverse;
        }
        losses[image] = image < *valid ? loss : 0.0;
    }
}

// d (images, pixels, classes): the derivative of the loss of each image, times factor * late. d is
// 0 for unused images and for labels that are not classes.
extern "C" __global__ void __launch_bounds__(256)
    overlap_dp(const double* __restrict__ p, const int* __restrict__ labels,
               const int* __restrict__ valid, const double* __restrict__ slopes, double factor,
               const double* __restrict__ late, float* __restrict__ d, int is_squared, int classes,
               int pixels, long long n) {
    const double scale = late ? *late * factor : factor;
    const long long used = (long long)*valid * pixels;
    EACH_INDEX(i, n) {
        const long long row = i / classes;
        const int own = (int)(i % classes), label = row < used ? labels[row] : -1;
        if (!is_valid(label, classes)) {
            d[i] = 0.0f;
            continue;
        }
        const double* slope = slopes + (row / pixels * classes + own) * 2;
        const double of_class = is_labelled(label, own, classes) ? slope[0] : 0.0;
        d[i] = (float)((of_class + slope[1] * (is_squared ? p[i] : 1.0)) * scale);
    }
}
