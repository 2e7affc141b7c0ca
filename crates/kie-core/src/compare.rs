//! What quantising weights costs: logits of a built-in text beside those of the model as stored.

/// Some prose and some code.
pub(crate) const TEXT: &str =
    "The quick brown fox jumps over the lazy dog, and in 1969 two people walked \
on the Moon. To sort a list, compare neighbours and swap them while they are out of order.\n\n\
def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n        \
a, b = b, a + b\n    return a\n";
/// Most tokens of it that are read.
pub(crate) const TOKENS: usize = 96;

/// Root of the squared differences from `stored` over the squares of `stored`.
pub(crate) fn relative_error(converted: &[f32], stored: &[f32]) -> f64 {
    let square = |x: f32| f64::from(x).powi(2);
    let error: f64 = converted.iter().zip(stored).map(|(a, b)| square(a - b)).sum();
    let size: f64 = stored.iter().map(|b| square(*b)).sum();
    (error / size.max(f64::MIN_POSITIVE)).sqrt()
}
