// libmlx's calls for products, handed to functions whose addresses blas.py writes to `their_…`.

#define PRODUCT(name, Scale, Number)                                                                             \
  using name##_t = void(int, int, int, int, int, int, Scale, const Number*, int, const Number*, int, Scale,      \
                        Number*, int);                                                                           \
  name##_t* their_##name;                                                                                        \
  void name(int order, int turn_a, int turn_b, int m, int n, int k, Scale alpha, const Number* a, int lda,       \
            const Number* b, int ldb, Scale beta, Number* c, int ldc) {                                          \
    their_##name(order, turn_a, turn_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);                           \
  }

extern "C" {
PRODUCT(cblas_sgemm, float, float)
PRODUCT(cblas_dgemm, double, double)
PRODUCT(cblas_cgemm, const void*, void)
}
