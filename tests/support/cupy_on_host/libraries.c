// Stand in for NVIDIA's libraries: libcuda.so.1, which finds one GPU, and NVRTC, whose "cubins" are
// the name of a unit, its options and its source.

#include <stdlib.h>
#include <string.h>

int cuInit(unsigned flags) { return 0; }

int cuDeviceGetCount(int* count) {
    *count = 1;
    return 0;
}

int cuDriverGetVersion(int* version) {
    *version = 13000;
    return 0;
}

int cuGetErrorName(int error, const char** name) {
    *name = "CUDA_ERROR_OF_THE_STAND_IN";
    return 0;
}

typedef struct {
    char *name, *source, *image;
    size_t size;
} Program;

const char* nvrtcGetErrorString(int error) { return "NVRTC_ERROR_OF_THE_STAND_IN"; }

int nvrtcVersion(int* major, int* minor) {
    *major = 13;
    *minor = 0;
    return 0;
}

int nvrtcGetNumSupportedArchs(int* count) {
    *count = 1;
    return 0;
}

int nvrtcGetSupportedArchs(int* architectures) {
    architectures[0] = 90;
    return 0;
}

int nvrtcCreateProgram(Program** program, const char* source, const char* name, int headers,
                       const char** texts, const char** names) {
    *program = calloc(1, sizeof(Program));
    (*program)->name = strdup(name);
    (*program)->source = strdup(source);
    return 0;
}

int nvrtcCompileProgram(Program* program, int count, const char** options) {
    size_t size = strlen(program->name) + 1 + strlen(program->source);
    for (int i = 0; i < count; i++) size += strlen(options[i]) + 1;
    char* end = program->image = malloc(size + 1);
    end = stpcpy(end, program->name);
    for (int i = 0; i < count; i++) {
        *end++ = '\n';
        end = stpcpy(end, options[i]);
    }
    *end++ = 0;
    end = stpcpy(end, program->source);
    program->size = (size_t)(end - program->image);
    return 0;
}

int nvrtcGetProgramLogSize(Program* program, size_t* size) {
    *size = 1;
    return 0;
}

int nvrtcGetProgramLog(Program* program, char* log) {
    *log = 0;
    return 0;
}

int nvrtcGetCUBINSize(Program* program, size_t* size) {
    *size = program->size;
    return 0;
}

int nvrtcGetCUBIN(Program* program, char* image) {
    memcpy(image, program->image, program->size);
    return 0;
}

int nvrtcDestroyProgram(Program** program) {
    free((*program)->name);
    free((*program)->source);
    free((*program)->image);
    free(*program);
    return 0;
}
