// The loss scale in device memory. Mirrors `arguments::LossScale` on the host.
struct LossScale {
    double scale;
    u64 steady;    // steps without an overflow since the last overflow or change of scale
    u64 patience;  // overflows left until the scale is halved
    u64 updates;   // steps that were applied
};
