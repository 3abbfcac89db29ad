// A stand-in for cuBLASLt: naive matrix products on the CPU, given to the stand-in driver's streams.
//
// Sums run in f64 and are rounded once to the type that the product asks for, whatever the order of the operands: so what
// differs from the CPU's own kernels is their rounding alone. An algorithm is valid for the descriptors that it was found
// for; other descriptors, a pointer that is less aligned than was said or a workspace that is too small are errors. While
// a product runs it writes garbage to all of the workspace that it asked for. Epilogues see the product in the type of the
// sum, before it is rounded. Of several candidates the first may be one that does not work. With a number in
// FERROTRON_STAND_IN_REFUSES half of the epilogues, which ones depends on it, are not supported. Of the two candidates that
// work one, which FERROTRON_STAND_IN_SLOW names, takes 20 ms longer.
#include <dlfcn.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <vector>

namespace {
enum Status { SUCCESS = 0, NOT_INITIALIZED = 1, INVALID_VALUE = 7, EXECUTION_FAILED = 13, NOT_SUPPORTED = 15 };
enum Type { F32 = 0, F64 = 1, F16 = 2, BF16 = 14 };
enum Compute { COMPUTE_32F = 68, COMPUTE_64F = 70 };
enum Epilogue { DEFAULT = 1, BIAS = 4, GELU_AUX = 160, GELU_AUX_BIAS = 164, DGELU = 192, BGRADB = 512 };
constexpr uint64_t MAGIC = 0x6c74616c676f0001, WORKSPACE = 8192;

struct Operation {
    int compute, scale, left = 0, right = 0;
    unsigned epilogue = DEFAULT;
    char *bias = nullptr, *aux = nullptr;
    int64_t aux_leading = 0;
    bool adds_bias() const { return epilogue == BIAS || epilogue == GELU_AUX_BIAS; }
    bool is_gelu() const { return epilogue == GELU_AUX || epilogue == GELU_AUX_BIAS; }
    bool has_input() const { return is_gelu() || epilogue == DGELU; }
};
struct Layout { int type; uint64_t rows, columns; int64_t leading; int batch = 1; int64_t stride = 0; };
struct Preference { uint64_t workspace = 0; uint32_t schemes = 7, alignment[4] = {256, 256, 256, 256}; };
struct Algorithm { uint64_t magic, shape, alignment[4], bias, aux; };
struct Found { Algorithm algorithm; size_t workspace; int state; float waves; int reserved[4]; };

size_t size(int type) { return type == F64 ? 8 : type == F32 ? 4 : type == F16 || type == BF16 ? 2 : 0; }

double half(uint16_t bits) {
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    const double magnitude = exponent == 31 ? (fraction ? NAN : INFINITY) : exponent ? ldexp(1024 + fraction, exponent - 25) : ldexp(fraction, -24);
    return bits >> 15 ? -magnitude : magnitude;
}

double load(const char* at, int type) {
    switch (type) {
        case F64: return *(const double*)at;
        case F32: return *(const float*)at;
        case F16: return half(*(const uint16_t*)at);
        default: {
            const uint32_t bits = (uint32_t)*(const uint16_t*)at << 16;
            float value;
            memcpy(&value, &bits, 4);
            return value;
        }
    }
}

// To the nearest, ties to the even one: `value` has the bits of the type of the sum.
void store(char* at, int type, double value) {
    if (type == F64) {
        *(double*)at = value;
    } else if (type == F32) {
        *(float*)at = (float)value;
    } else if (type == BF16) {
        const float single = (float)value;
        uint32_t bits;
        memcpy(&bits, &single, 4);
        *(uint16_t*)at = isnan(single) ? (bits >> 16 | 64) : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    } else {
        const uint16_t sign = signbit(value) ? 0x8000 : 0;
        const double magnitude = fabs((float)value);
        uint16_t bits;
        if (isnan(magnitude)) {
            bits = 0x7e00;
        } else if (magnitude >= 65520) {
            bits = 0x7c00;
        } else if (magnitude < ldexp(1, -14)) {
            bits = (uint16_t)nearbyint(ldexp(magnitude, 24));
        } else {
            const int exponent = ilogb(magnitude);
            bits = (uint16_t)(((exponent + 14) << 10) + (int)nearbyint(ldexp(magnitude, 10 - exponent)));
        }
        *(uint16_t*)at = sign | bits;
    }
}

uint64_t mixed(uint64_t hash, uint64_t value) { return (hash ^ value) * 0x9e3779b97f4a7c15 >> 7 ^ hash << 11; }

uint64_t mixed(uint64_t hash, const Layout& layout) {
    for (uint64_t value : {(uint64_t)layout.type, layout.rows, layout.columns, (uint64_t)layout.leading, (uint64_t)layout.batch, (uint64_t)layout.stride})
        hash = mixed(hash, value);
    return hash;
}

uint64_t shape(const Operation& operation, const Layout& a, const Layout& b, const Layout& c, const Layout& d) {
    uint64_t hash = 1;
    for (int value : {operation.compute, operation.scale, operation.left, operation.right, (int)operation.epilogue, (int)operation.aux_leading})
        hash = mixed(hash, value);
    return mixed(mixed(mixed(mixed(hash, a), b), c), d);
}

// What the documentation demands of descriptors that go together.
int verdict(const Operation& operation, const Layout& a, const Layout& b, const Layout& c, const Layout& d) {
    const uint64_t m = operation.left ? a.columns : a.rows, k = operation.left ? a.rows : a.columns;
    const uint64_t n = operation.right ? b.rows : b.columns, depth = operation.right ? b.columns : b.rows;
    if (k != depth || c.rows != m || c.columns != n || d.rows != m || d.columns != n || !m || !n || !k) return INVALID_VALUE;
    for (const Layout* layout : {&a, &b, &c, &d})
        if (layout->batch != d.batch || layout->leading < (int64_t)layout->rows) return INVALID_VALUE;
    const bool doubles = operation.compute == COMPUTE_64F;
    if (operation.scale != (doubles ? F64 : F32) || a.type != b.type || c.type != d.type) return NOT_SUPPORTED;
    if ((a.type == F64) != doubles || !(d.type == a.type || (size(a.type) == 2 && d.type == F32))) return NOT_SUPPORTED;
    if (operation.epilogue == DEFAULT) return SUCCESS;
    if ((operation.adds_bias() || operation.epilogue == BGRADB) && !operation.bias) return INVALID_VALUE;
    if (operation.has_input() && (!operation.aux || operation.aux_leading % 8 || operation.aux_leading < (int64_t)m)) return INVALID_VALUE;
    // No epilogue in f64, so that there is something which must do without; of a batch none is asked for.
    const bool known = operation.adds_bias() || operation.has_input() || operation.epilogue == BGRADB;
    return known && !doubles && d.batch == 1 ? SUCCESS : NOT_SUPPORTED;
}

// Whether an epilogue is one of those that are refused.
bool refused(const Operation& operation, uint64_t shape) {
    static const char* const seed = getenv("FERROTRON_STAND_IN_REFUSES");
    return seed && operation.epilogue != DEFAULT && (mixed(shape, atoll(seed)) * 0x9e3779b97f4a7c15) >> 63;
}

// Of the epilogue's pointers no more than 16 bytes matter.
uint64_t alignment(const void* address) {
    const uint64_t found = (uintptr_t)address & -(uintptr_t)address;
    return found < 16 ? found : 16;
}

bool aligned(const void* address, uint64_t alignment) { return !alignment || (uintptr_t)address % alignment == 0; }

// GELU, tanh form: Hendrycks and Gimpel, arXiv 1606.08415.
double gelu(double x) { return 0.5 * x * (1 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))); }

double gelu_derivative(double x) {
    const double t = tanh(0.7978845608028654 * (x + 0.044715 * x * x * x));
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * 0.7978845608028654 * (1 + 3 * 0.044715 * x * x);
}

struct Product {
    Operation operation;
    Layout a, b, c, d;
    const char *at_a, *at_b, *at_c;
    char *at_d, *workspace;
    double alpha, beta;
    bool is_slow;
};

// op(X) of one product of the batch, row after row.
std::vector<double> read(const char* at, const Layout& layout, int transposed, int index) {
    const uint64_t rows = transposed ? layout.columns : layout.rows, columns = transposed ? layout.rows : layout.columns;
    std::vector<double> out(rows * columns);
    for (uint64_t i = 0; i < rows; i++)
        for (uint64_t j = 0; j < columns; j++) {
            const int64_t offset = (transposed ? i : j) * layout.leading + (transposed ? j : i) + index * layout.stride;
            out[i * columns + j] = load(at + offset * (int64_t)size(layout.type), layout.type);
        }
    return out;
}

void compute(const Product& product) {
    const Layout& d = product.d;
    const Operation& operation = product.operation;
    const uint64_t m = d.rows, n = d.columns, k = operation.left ? product.a.rows : product.a.columns;
    const bool doubles = operation.compute == COMPUTE_64F;
    memset(product.workspace, 0xa5, WORKSPACE);
    if (product.is_slow) usleep(20000);
    for (int index = 0; index < d.batch; index++) {
        const std::vector<double> a = read(product.at_a, product.a, operation.left, index);
        const std::vector<double> b = read(product.at_b, product.b, operation.right, index);
        std::vector<double> row(n);
        // The columns of B alone: neither alpha nor beta has a part in it.
        if (operation.epilogue == BGRADB)
            for (uint64_t j = 0; j < n; j++) {
                double sum = 0;
                for (uint64_t l = 0; l < k; l++) sum += b[l * n + j];
                store(operation.bias + j * size(d.type), d.type, (float)sum);
            }
        for (uint64_t i = 0; i < m; i++) {
            row.assign(n, 0.0);
            for (uint64_t l = 0; l < k; l++)
                for (uint64_t j = 0; j < n; j++) row[j] += a[i * k + l] * b[l * n + j];
            for (uint64_t j = 0; j < n; j++) {
                double value = product.alpha * row[j];
                const int64_t at = (index * product.c.stride + j * product.c.leading + i) * (int64_t)size(product.c.type);
                // With 0 the old values are not read: they may be no numbers.
                if (product.beta != 0) value += product.beta * load(product.at_c + at, product.c.type);
                if (operation.adds_bias()) value += load(operation.bias + i * size(d.type), d.type);
                if (operation.is_gelu()) {
                    store(operation.aux + (j * operation.aux_leading + i) * size(d.type), d.type, (float)value);
                    value = gelu((float)value);
                }
                if (operation.epilogue == DGELU)
                    value *= gelu_derivative(load(operation.aux + (j * operation.aux_leading + i) * size(d.type), d.type));
                store(product.at_d + (index * d.stride + j * d.leading + i) * (int64_t)size(d.type), d.type, doubles ? value : (float)value);
            }
        }
    }
}

template <class T> int take(T& value, const void* from, size_t bytes) {
    if (bytes != sizeof(T)) return INVALID_VALUE;
    memcpy(&value, from, bytes);
    return SUCCESS;
}
}  // namespace

#define API extern "C" __attribute__((visibility("default")))

API size_t cublasLtGetVersion() { return 130000; }
API int cublasLtCreate(void** handle) { *handle = new int(0); return SUCCESS; }
API const char* cublasLtGetStatusName(int status) {
    switch (status) {
        case SUCCESS: return "CUBLAS_STATUS_SUCCESS";
        case NOT_INITIALIZED: return "CUBLAS_STATUS_NOT_INITIALIZED";
        case INVALID_VALUE: return "CUBLAS_STATUS_INVALID_VALUE";
        case EXECUTION_FAILED: return "CUBLAS_STATUS_EXECUTION_FAILED";
        case NOT_SUPPORTED: return "CUBLAS_STATUS_NOT_SUPPORTED";
        default: return nullptr;
    }
}
API int cublasLtDestroy(void* handle) { delete (int*)handle; return SUCCESS; }

API int cublasLtMatmulDescCreate(void** operation, int compute, int scale) { *operation = new Operation{compute, scale}; return SUCCESS; }
API int cublasLtMatmulDescDestroy(void* operation) { delete (Operation*)operation; return SUCCESS; }
API int cublasLtMatmulDescSetAttribute(void* handle, int attribute, const void* from, size_t bytes) {
    Operation& operation = *(Operation*)handle;
    switch (attribute) {
        case 3: return take(operation.left, from, bytes);
        case 4: return take(operation.right, from, bytes);
        case 7: return take(operation.epilogue, from, bytes);
        case 8: return take(operation.bias, from, bytes);
        case 11: return take(operation.aux, from, bytes);
        case 12: return take(operation.aux_leading, from, bytes);
        default: return INVALID_VALUE;
    }
}

API int cublasLtMatrixLayoutCreate(void** layout, int type, uint64_t rows, uint64_t columns, int64_t leading) {
    if (!size(type)) return INVALID_VALUE;
    *layout = new Layout{type, rows, columns, leading};
    return SUCCESS;
}
API int cublasLtMatrixLayoutDestroy(void* layout) { delete (Layout*)layout; return SUCCESS; }
API int cublasLtMatrixLayoutSetAttribute(void* handle, int attribute, const void* from, size_t bytes) {
    Layout& layout = *(Layout*)handle;
    switch (attribute) {
        case 5: return take(layout.batch, from, bytes);
        case 6: return take(layout.stride, from, bytes);
        default: return INVALID_VALUE;
    }
}

API int cublasLtMatmulPreferenceCreate(void** preference) { *preference = new Preference; return SUCCESS; }
API int cublasLtMatmulPreferenceDestroy(void* preference) { delete (Preference*)preference; return SUCCESS; }
API int cublasLtMatmulPreferenceSetAttribute(void* handle, int attribute, const void* from, size_t bytes) {
    Preference& preference = *(Preference*)handle;
    if (attribute == 1) return take(preference.workspace, from, bytes);
    if (attribute == 3) return take(preference.schemes, from, bytes);
    return attribute >= 5 && attribute <= 8 ? take(preference.alignment[attribute - 5], from, bytes) : INVALID_VALUE;
}

API int cublasLtMatmulAlgoGetHeuristic(void* handle, const Operation* operation, const Layout* a, const Layout* b, const Layout* c, const Layout* d,
                                       const Preference* preference, int most, Found* found, int* count) {
    if (!handle) return NOT_INITIALIZED;
    *count = 0;
    const int status = verdict(*operation, *a, *b, *c, *d);
    if (status != SUCCESS || preference->workspace < WORKSPACE || most < 1) return status != SUCCESS ? status : NOT_SUPPORTED;
    const uint64_t kind = shape(*operation, *a, *b, *c, *d);
    if (refused(*operation, kind)) return kind & 1 ? NOT_SUPPORTED : INVALID_VALUE;
    const uint32_t* needed = preference->alignment;
    const auto candidate = [&](uint64_t magic, size_t workspace, int state) {
        const Algorithm algorithm{magic, kind, {needed[0], needed[1], needed[2], needed[3]}, alignment(operation->bias), alignment(operation->aux)};
        found[(*count)++] = Found{algorithm, workspace, state, 1};
    };
    if (most > 1 && kind >> 9 & 1) candidate(0, 0, NOT_SUPPORTED);
    for (uint64_t i = 0; i < 2 && *count < most; i++) candidate(MAGIC + i, i ? 0 : WORKSPACE, SUCCESS);
    return SUCCESS;
}

API int cublasLtMatmul(void* handle, const Operation* operation, const void* alpha, const void* at_a, const Layout* a, const void* at_b, const Layout* b,
                       const void* beta, const void* at_c, const Layout* c, void* at_d, const Layout* d, const Algorithm* algorithm, void* workspace,
                       size_t bytes, void* stream) {
    if (!handle) return NOT_INITIALIZED;
    const int status = verdict(*operation, *a, *b, *c, *d);
    if (status != SUCCESS) return status;
    if (algorithm->magic - MAGIC > 1 || algorithm->shape != shape(*operation, *a, *b, *c, *d)) return NOT_SUPPORTED;
    const void* addresses[] = {at_a, at_b, at_c, at_d};
    for (int i = 0; i < 4; i++)
        if ((uintptr_t)addresses[i] % algorithm->alignment[i]) return INVALID_VALUE;
    if (!aligned(operation->bias, algorithm->bias) || !aligned(operation->aux, algorithm->aux)) return INVALID_VALUE;
    if (bytes < WORKSPACE || (uintptr_t)workspace % 256) return INVALID_VALUE;
    const bool doubles = operation->scale == F64;
    const auto scale = [&](const void* at) { return doubles ? *(const double*)at : *(const float*)at; };
    using Give = void (*)(void*, void (*)(void*), void*);
    static const Give give = (Give)dlsym(RTLD_DEFAULT, "stand_in_give");
    if (!give) return EXECUTION_FAILED;
    Product* product = new Product{*operation, *a, *b, *c, *d, (const char*)at_a, (const char*)at_b, (const char*)at_c,
                                   (char*)at_d, (char*)workspace, scale(alpha), scale(beta), false};
    static const char* const slow = getenv("FERROTRON_STAND_IN_SLOW");
    product->is_slow = slow && algorithm->magic - MAGIC == (uint64_t)atoll(slow);
    // It stays: a recorded graph may run it again.
    give(stream, [](void* data) { compute(*(const Product*)data); }, product);
    return SUCCESS;
}
