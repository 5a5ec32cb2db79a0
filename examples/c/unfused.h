/* Unfused causal attention of one head, forward and backward, in plain loops that a compiler
 * vectorises. It holds the whole score matrix in memory. The including file defines REAL and
 * UNFUSED: the double version is the reference, the float version the baseline for the speed of
 * the fused kernels. Input rows are `stride` elements apart. results holds out, dq, dk and dv, each
 * packed (n, d). */
static void UNFUSED(int n, int d, int stride, const float *q, const float *k, const float *v, const float *dout,
                    REAL *results) {
  REAL *p = calloc((size_t)n * n, sizeof(REAL)), *dp = calloc((size_t)n * n, sizeof(REAL));
  REAL *kt = malloc((size_t)n * d * sizeof(REAL)), *vt = malloc((size_t)n * d * sizeof(REAL));
  REAL *out = results, *dq = out + n * d, *dk = dq + n * d, *dv = dk + n * d, scale = (REAL)(1 / sqrt(d));
  memset(results, 0, 4 * (size_t)n * d * sizeof(REAL));
  for (int j = 0; j < n; j++)
    for (int c = 0; c < d; c++) kt[c * n + j] = k[j * stride + c], vt[c * n + j] = v[j * stride + c];
  for (int i = 0; i < n; i++) /* scores and the gradient of the weights: Q K^T and dO V^T */
    for (int c = 0; c < d; c++)
      for (int j = 0; j <= i; j++) {
        p[(size_t)i * n + j] += q[i * stride + c] * scale * kt[c * n + j];
        dp[(size_t)i * n + j] += dout[i * stride + c] * vt[c * n + j];
      }
  for (int i = 0; i < n; i++) { /* softmax and its gradient, row by row */
    REAL *row = p + (size_t)i * n, *drow = dp + (size_t)i * n, largest = row[0], sum = 0, delta = 0;
    for (int j = 0; j <= i; j++) largest = row[j] > largest ? row[j] : largest;
    for (int j = 0; j <= i; j++) sum += row[j] = (REAL)exp(row[j] - largest);
    for (int j = 0; j <= i; j++) row[j] /= sum, delta += row[j] * drow[j];
    for (int j = 0; j <= i; j++) drow[j] = row[j] * (drow[j] - delta) * scale;
  }
  for (int i = 0; i < n; i++) /* O = P V, dQ = dS K, dK = dS^T Q, dV = P^T dO */
    for (int j = 0; j <= i; j++) {
      REAL weight = p[(size_t)i * n + j], ds = dp[(size_t)i * n + j];
      for (int c = 0; c < d; c++) {
        out[i * d + c] += weight * v[j * stride + c];
        dq[i * d + c] += ds * k[j * stride + c];
        dk[j * d + c] += ds * q[i * stride + c];
        dv[j * d + c] += weight * dout[i * stride + c];
      }
    }
  free(p), free(dp), free(kt), free(vt);
}
#undef REAL
#undef UNFUSED
