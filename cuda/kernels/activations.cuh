// Activation functions and their derivatives in A.

INLINE A silu(A x) { return x * sigmoid_for<T>(x); }
INLINE A silu_derivative(A x) {
    A y = sigmoid_for<T>(x);
    return y * (A(1) + x * (A(1) - y));
}
INLINE A gelu_inner(A x) { return A(2 * 0.7978845608028654) * (x + A(0.044715) * x * x * x); }  // 2 sqrt(2/pi)
INLINE A gelu_tanh(A x) { return x * sigmoid_for<T>(gelu_inner(x)); }
INLINE A gelu_tanh_derivative(A x) {
    A inner_derivative = A(2 * 0.7978845608028654) * (A(1) + A(3 * 0.044715) * x * x);
    A y = sigmoid_for<T>(gelu_inner(x));
    return y + x * y * (A(1) - y) * inner_derivative;
}
