//! Trends of measured values: a line of least squares, and the means of the fifths of a time.

/// Points of a series, as places and values, in ascending order of the places.
pub type Points = [(f64, f64)];

/// Largest factor of the last fifth's mean to the second fifth's that is still flat.
const FLAT_FACTOR: f64 = 1.1;

/// Returns the slope of the line of least squares through the points: value per unit of place.
/// `None` where the points do not determine a line.
pub fn slope(points: &Points) -> Option<f64> {
    let count = points.len() as f64;
    let mean_place = points.iter().map(|(place, _)| place).sum::<f64>() / count;
    let mean_value = points.iter().map(|(_, value)| value).sum::<f64>() / count;
    let (mut products, mut squares) = (0.0, 0.0);
    for (place, value) in points {
        products += (place - mean_place) * (value - mean_value);
        squares += (place - mean_place).powi(2);
    }
    (squares > 0.0).then(|| products / squares)
}

/// Returns the mean of the values; `None` where there are none.
fn mean(points: &Points) -> Option<f64> {
    let sum: f64 = points.iter().map(|(_, value)| value).sum();
    (!points.is_empty()).then(|| sum / points.len() as f64)
}

/// Returns the mean value of each fifth of the time from the first point to the last. `None` where
/// a fifth has no point.
pub fn fifths(points: &Points) -> Option<[f64; 5]> {
    let (from, to) = (points.first()?.0, points.last()?.0);
    let fifth_of = |place: f64| ((place - from) / (to - from) * 5.0).min(4.0) as usize;
    let mut means = [0.0; 5];
    for (number, value) in means.iter_mut().enumerate() {
        let within: Vec<_> =
            points.iter().copied().filter(|(place, _)| fifth_of(*place) == number).collect();
        *value = mean(&within)?;
    }
    Some(means)
}

/// Returns whether the last fifth's mean is at most 1.1 times the second fifth's, or at most
/// `allowance` above it.
pub fn is_flat(fifths: [f64; 5], allowance: f64) -> bool {
    let (second, last) = (fifths[1], fifths[4]);
    last <= (FLAT_FACTOR * second).max(second + allowance)
}

/// Returns the value below which a share of sorted values is; `NaN` where there are none.
pub fn percentile(sorted: &[f64], share: f64) -> f64 {
    let last = sorted.len().saturating_sub(1);
    sorted.get((last as f64 * share).round() as usize).copied().unwrap_or(f64::NAN)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn points(value: impl Fn(f64) -> f64) -> Vec<(f64, f64)> {
        (0..50).map(|place| (f64::from(place), value(f64::from(place)))).collect()
    }

    #[test]
    fn the_slope_is_that_of_the_line_whatever_is_around_it() {
        let noisy = points(|place| 3.0 + 2.0 * place + if place % 2.0 == 0.0 { 0.5 } else { -0.5 });
        let slope_of_noisy = slope(&noisy).expect("a slope");
        assert!((slope_of_noisy - 2.0).abs() < 0.01, "{slope_of_noisy}");
        assert_eq!(slope(&points(|_| 7.0)), Some(0.0));
        assert_eq!(slope(&[(1.0, 2.0)]), None);
        assert_eq!(slope(&[]), None);
    }

    #[test]
    fn a_saw_is_flat_and_a_slope_is_not() {
        let saw = fifths(&points(|place| 100.0 + place % 5.0)).expect("fifths");
        assert!(is_flat(saw, 0.0), "{saw:?}");
        let growing = fifths(&points(|place| 100.0 + place)).expect("fifths");
        assert_eq!(growing.map(f64::round), [105.0, 115.0, 125.0, 135.0, 145.0]);
        assert!(!is_flat(growing, 20.0), "{growing:?}");
        assert!(is_flat(growing, 40.0), "the allowance counts from the second fifth");
        // What grows only at first, such as a cache that fills, is flat.
        let filling = fifths(&points(|place| place.min(12.0))).expect("fifths");
        assert!(is_flat(filling, 0.0), "{filling:?}");
        assert_eq!(fifths(&[(0.0, 1.0), (9.0, 1.0)]), None);
        assert_eq!(fifths(&[]), None);
    }

    #[test]
    fn percentiles_are_of_the_sorted_values() {
        let values: Vec<_> = (0..=1_000).map(f64::from).collect();
        assert_eq!(
            [0.5, 0.99, 0.999, 1.0].map(|share| percentile(&values, share)),
            [500.0, 990.0, 999.0, 1_000.0]
        );
        assert!(percentile(&[], 0.5).is_nan());
    }
}
