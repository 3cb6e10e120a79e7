// cuBLASLt's functions on host memory, of float32 and bfloat16, as its header declares and describes them. What a call
// gets wrong, it refuses; what has been made and not destroyed, it counts.
#include "cublaslt.h"

#include <cstdint>
#include <cstring>
#include <initializer_list>

namespace {
const uint64_t CHOSEN = 0x5eed, UNUSABLE = 0xbad, ID = 6, PARTS = 7;  // the last: places in an algorithm's data
struct Handle {};
struct Operation {
    cublasComputeType_t compute;
    cudaDataType_t scale;
    int32_t turned[2];
    uint32_t epilogue;
    const void *bias;
};
struct Layout {
    cudaDataType type;
    uint64_t rows, columns;
    int64_t leading, stride;
    int32_t batch;
};
struct Preference {
    uint64_t most;
    uint32_t schemes, alignment[4];
};
Handle handle;
int alive = 0;
uint64_t more_than_allowed = 0;
int unusable = 0;  // algorithms that come before the one that can be used
bool splits = false;  // whether all algorithms that may split sums leave out terms

template <class To, class From> To *as(From *from) { return reinterpret_cast<To *>(from); }

template <class Field> cublasStatus_t put(Field &field, const void *value, size_t size) {
    if (!value || size != sizeof(Field)) return CUBLAS_STATUS_INVALID_VALUE;
    std::memcpy(&field, value, size);
    return CUBLAS_STATUS_SUCCESS;
}

float read(const Layout &layout, const void *memory, int64_t at) {
    if (layout.type == CUDA_R_32F) return static_cast<const float *>(memory)[at];
    const uint32_t bits = static_cast<uint32_t>(static_cast<const uint16_t *>(memory)[at]) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

void write(const Layout &layout, void *memory, int64_t at, float value) {
    if (layout.type == CUDA_R_32F) {
        static_cast<float *>(memory)[at] = value;
        return;
    }
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    static_cast<uint16_t *>(memory)[at] = static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Whether four matrices make up a product; its extents.
bool agree(const Operation &op, const Layout &a, const Layout &b, const Layout &c, const Layout &d, int64_t (&sizes)[3]) {
    sizes[0] = op.turned[0] ? a.columns : a.rows, sizes[1] = op.turned[1] ? b.rows : b.columns;
    sizes[2] = op.turned[0] ? a.rows : a.columns;
    const int64_t others = op.turned[1] ? b.columns : b.rows;
    for (const Layout *each : {&a, &b, &c, &d})
        if (each->leading < static_cast<int64_t>(each->rows) || each->batch != d.batch || each->stride < 0) return false;
    for (const Layout *each : {&c, &d})
        if (static_cast<int64_t>(each->rows) != sizes[0] || static_cast<int64_t>(each->columns) != sizes[1]) return false;
    const bool narrow = a.type == CUDA_R_16BF && (d.type == CUDA_R_16BF || d.type == CUDA_R_32F);
    const bool types = a.type == b.type && c.type == d.type && (narrow || (a.type == CUDA_R_32F && d.type == CUDA_R_32F));
    const bool rounded = op.compute == CUBLAS_COMPUTE_32F_FAST_TF32 && a.type == CUDA_R_32F;
    return others == sizes[2] && types && op.scale == CUDA_R_32F && (op.compute == CUBLAS_COMPUTE_32F || rounded);
}
} // namespace

extern "C" {
int shim_alive() { return alive; }
void shim_needs_more(uint64_t bytes) { more_than_allowed = bytes; }
void shim_offers_first(int count) { unusable = count; }
void shim_splits(int whether) { splits = whether; }

size_t cublasLtGetVersion() { return 130203; }
size_t cublasLtGetCudartVersion() { return 13020; }
const char *cublasLtGetStatusName(cublasStatus_t status) {
    return status == CUBLAS_STATUS_NOT_SUPPORTED ? "CUBLAS_STATUS_NOT_SUPPORTED" : "CUBLAS_STATUS_INVALID_VALUE";
}
cublasStatus_t cublasLtCreate(cublasLtHandle_t *made) {
    *made = as<cublasLtContext>(&handle);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *made, cublasComputeType_t compute, cudaDataType_t scale) {
    *made = as<cublasLtMatmulDescOpaque_t>(new Operation{compute, scale, {0, 0}, CUBLASLT_EPILOGUE_DEFAULT, nullptr});
    return ++alive, CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t made) {
    delete as<Operation>(made);
    return --alive, CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescSetAttribute(
    cublasLtMatmulDesc_t made, cublasLtMatmulDescAttributes_t attribute, const void *value, size_t size
) {
    auto &op = *as<Operation>(made);
    if (attribute == CUBLASLT_MATMUL_DESC_TRANSA) return put(op.turned[0], value, size);
    if (attribute == CUBLASLT_MATMUL_DESC_TRANSB) return put(op.turned[1], value, size);
    if (attribute == CUBLASLT_MATMUL_DESC_EPILOGUE) return put(op.epilogue, value, size);
    if (attribute == CUBLASLT_MATMUL_DESC_BIAS_POINTER) return put(op.bias, value, size);
    return CUBLAS_STATUS_INVALID_VALUE;
}

cublasStatus_t cublasLtMatrixLayoutCreate(
    cublasLtMatrixLayout_t *made, cudaDataType type, uint64_t rows, uint64_t columns, int64_t leading
) {
    *made = as<cublasLtMatrixLayoutOpaque_t>(new Layout{type, rows, columns, leading, 0, 1});
    return ++alive, CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t made) {
    delete as<Layout>(made);
    return --alive, CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutSetAttribute(
    cublasLtMatrixLayout_t made, cublasLtMatrixLayoutAttribute_t attribute, const void *value, size_t size
) {
    auto &layout = *as<Layout>(made);
    if (attribute == CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT) return put(layout.batch, value, size);
    if (attribute == CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET) return put(layout.stride, value, size);
    return CUBLAS_STATUS_INVALID_VALUE;
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *made) {
    *made = as<cublasLtMatmulPreferenceOpaque_t>(new Preference{0, CUBLASLT_REDUCTION_SCHEME_MASK, {256, 256, 256, 256}});
    return ++alive, CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t made) {
    delete as<Preference>(made);
    return --alive, CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(
    cublasLtMatmulPreference_t made, cublasLtMatmulPreferenceAttributes_t attribute, const void *value, size_t size
) {
    auto &wanted = *as<Preference>(made);
    if (attribute == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES) return put(wanted.most, value, size);
    if (attribute == CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK) return put(wanted.schemes, value, size);
    const int i = attribute - CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES;
    return i >= 0 && i < 4 ? put(wanted.alignment[i], value, size) : CUBLAS_STATUS_INVALID_VALUE;
}

// The algorithm says what it was chosen for: scratch memory and alignments, which a call must then keep to.
cublasStatus_t cublasLtMatmulAlgoGetHeuristic(
    cublasLtHandle_t here, cublasLtMatmulDesc_t op, cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
    cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d, cublasLtMatmulPreference_t wanted, int count,
    cublasLtMatmulHeuristicResult_t found[], int *returned
) {
    int64_t sizes[3];
    const auto &preference = *as<Preference>(wanted);
    if (here != as<cublasLtContext>(&handle) || count < 1) return CUBLAS_STATUS_INVALID_VALUE;
    if (!agree(*as<Operation>(op), *as<Layout>(a), *as<Layout>(b), *as<Layout>(c), *as<Layout>(d), sizes))
        return CUBLAS_STATUS_NOT_SUPPORTED;
    const auto &operation = *as<Operation>(op);
    const bool biased = operation.epilogue == CUBLASLT_EPILOGUE_BIAS;
    if (!biased && operation.epilogue != CUBLASLT_EPILOGUE_DEFAULT) return CUBLAS_STATUS_NOT_SUPPORTED;
    if (biased && (!operation.bias || reinterpret_cast<uintptr_t>(operation.bias) % 16)) return CUBLAS_STATUS_NOT_SUPPORTED;
    const bool may_split = preference.schemes == CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    if (!may_split && preference.schemes != CUBLASLT_REDUCTION_SCHEME_NONE) return CUBLAS_STATUS_NOT_SUPPORTED;
    *returned = unusable < count ? unusable + 1 : count;
    for (int n = 0; n < *returned; ++n) {
        auto &algo = found[n].algo;
        found[n] = {};
        algo.data[0] = n < unusable ? UNUSABLE : CHOSEN;
        for (int i = 0; i < 4; ++i) algo.data[1 + i] = preference.alignment[i];
        found[n].workspaceSize = algo.data[5] = preference.most + more_than_allowed;
        algo.data[ID] = 66, algo.data[PARTS] = splits && may_split ? sizes[2] - 1 : 1;
        if (n == unusable) break;
        if (n % 4 == 0) found[n].state = CUBLAS_STATUS_NOT_SUPPORTED;
        if (n % 4 == 1) ++found[n].workspaceSize;
        if (n % 4 == 2) algo.data[PARTS] = sizes[2] - 1;  // which does not divide the terms
    }
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoCheck(
    cublasLtHandle_t here, cublasLtMatmulDesc_t op, cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
    cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d, const cublasLtMatmulAlgo_t *algo,
    cublasLtMatmulHeuristicResult_t *result
) {
    int64_t sizes[3];
    if (here != as<cublasLtContext>(&handle)) return CUBLAS_STATUS_INVALID_VALUE;
    const bool fit = agree(*as<Operation>(op), *as<Layout>(a), *as<Layout>(b), *as<Layout>(c), *as<Layout>(d), sizes);
    *result = {};
    result->workspaceSize = algo->data[5];
    return fit && algo->data[0] == CHOSEN ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED;
}

cublasStatus_t cublasLtMatmulAlgoConfigSetAttribute(
    cublasLtMatmulAlgo_t *algo, cublasLtMatmulAlgoConfigAttributes_t attribute, const void *value, size_t size
) {
    if (size != 4 || attribute != CUBLASLT_ALGO_CONFIG_SPLITK_NUM) return CUBLAS_STATUS_INVALID_VALUE;
    int32_t parts;
    std::memcpy(&parts, value, 4);
    algo->data[PARTS] = static_cast<uint64_t>(parts);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoConfigGetAttribute(
    const cublasLtMatmulAlgo_t *algo, cublasLtMatmulAlgoConfigAttributes_t attribute, void *value, size_t size,
    size_t *written
) {
    const bool id = attribute == CUBLASLT_ALGO_CONFIG_ID;
    if (size != 4 || (!id && attribute != CUBLASLT_ALGO_CONFIG_SPLITK_NUM)) return CUBLAS_STATUS_INVALID_VALUE;
    const int32_t setting = static_cast<int32_t>(algo->data[id ? ID : PARTS]);
    std::memcpy(value, &setting, 4);
    *written = 4;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(
    cublasLtHandle_t here, cublasLtMatmulDesc_t op, const void *alpha, const void *A, cublasLtMatrixLayout_t a,
    const void *B, cublasLtMatrixLayout_t b, const void *beta, const void *C, cublasLtMatrixLayout_t c, void *D,
    cublasLtMatrixLayout_t d, const cublasLtMatmulAlgo_t *algo, void *workspace, size_t size, cudaStream_t stream
) {
    int64_t sizes[3];
    const auto &operation = *as<Operation>(op);
    const Layout &left = *as<Layout>(a), &right = *as<Layout>(b), &base = *as<Layout>(c), &made = *as<Layout>(d);
    if (here != as<cublasLtContext>(&handle) || !agree(operation, left, right, base, made, sizes))
        return CUBLAS_STATUS_INVALID_VALUE;
    const void *places[4] = {A, B, C, D};
    for (int i = 0; i < 4; ++i)
        if (reinterpret_cast<uintptr_t>(places[i]) % algo->data[1 + i]) return CUBLAS_STATUS_INVALID_VALUE;
    if (algo->data[0] != CHOSEN || size < algo->data[5] || stream != reinterpret_cast<cudaStream_t>(7))
        return CUBLAS_STATUS_INVALID_VALUE;
    const float one = *static_cast<const float *>(alpha), adds = *static_cast<const float *>(beta);
    std::memset(workspace, 0xff, size);
    const auto parts = static_cast<int64_t>(algo->data[PARTS]);
    const int64_t summed = sizes[2] / parts * parts;  // the terms that do not divide are left out
    for (int64_t i = 0; i < made.batch; ++i)
        for (int64_t n = 0; n < sizes[1]; ++n)
            for (int64_t m = 0; m < sizes[0]; ++m) {
                double sum = 0;
                for (int64_t k = 0; k < summed; ++k) {
                    const int64_t x = operation.turned[0] ? m * left.leading + k : k * left.leading + m;
                    const int64_t y = operation.turned[1] ? k * right.leading + n : n * right.leading + k;
                    sum += static_cast<double>(read(left, A, i * left.stride + x)) * read(right, B, i * right.stride + y);
                }
                sum *= one;
                if (adds != 0) sum += adds * read(base, C, i * base.stride + n * base.leading + m);
                if (operation.bias) sum += read(made, operation.bias, m);  // of the result's type
                write(made, D, i * made.stride + n * made.leading + m, static_cast<float>(sum));
            }
    return CUBLAS_STATUS_SUCCESS;
}
}
