//! Axes: from figures to pixels, with round numbers at the ticks.

/// One axis.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Scale {
    low: f64,
    high: f64,
    /// Pixels of `low` and `high`.
    pixels: (f64, f64),
    logarithmic: bool,
    /// Where lines and numbers stand, ascending.
    pub(crate) ticks: Vec<f64>,
}

impl Scale {
    /// From 0 to a round number at or above `largest`, with about `wanted` ticks.
    pub(crate) fn linear(largest: f64, wanted: u32, pixels: (f64, f64)) -> Scale {
        let largest = if largest.is_finite() && largest > 0.0 { largest } else { 1.0 };
        let step = round_step(largest / f64::from(wanted.max(1)));
        let count = (largest / step - 1e-9).ceil().max(1.0);
        let ticks = (0..=count as u32).map(|i| f64::from(i) * step).collect();
        Scale { low: 0.0, high: count * step, pixels, logarithmic: false, ticks }
    }

    /// From a power of ten at or below the least to one at or above the largest; what is not above 0 is left out.
    pub(crate) fn logarithmic(numbers: impl Iterator<Item = f64>, pixels: (f64, f64)) -> Scale {
        let (least, largest) = numbers
            .filter(|number| number.is_finite() && *number > 0.0)
            .fold((f64::MAX, 0.0f64), |(least, largest), number| (least.min(number), largest.max(number)));
        let (least, largest) = if largest > 0.0 { (least, largest) } else { (1.0, 10.0) };
        let low = (least.log10() + 1e-9).floor() as i32;
        let high = ((largest.log10() - 1e-9).ceil() as i32).max(low + 1);
        let ticks = (low..=high).map(|power| 10f64.powi(power)).collect();
        Scale { low: f64::from(low), high: f64::from(high), pixels, logarithmic: true, ticks }
    }

    /// Where `number` stands; what lies outside stands at the nearer end.
    pub(crate) fn at(&self, number: f64) -> f64 {
        let number = match number {
            number if !self.logarithmic => number,
            number if number > 0.0 => number.log10(),
            _ => self.low,
        };
        let share = ((number - self.low) / (self.high - self.low)).clamp(0.0, 1.0);
        let share = if share.is_finite() { share } else { 0.0 };
        self.pixels.0 + share * (self.pixels.1 - self.pixels.0)
    }
}

/// The least of 1, 2, 2.5, 5 times a power of ten that is at least `step`.
fn round_step(step: f64) -> f64 {
    let power = 10f64.powi(step.log10().floor() as i32);
    let rounded = [1.0, 2.0, 2.5, 5.0].into_iter().map(|factor| factor * power).find(|&one| one >= step * (1.0 - 1e-9));
    rounded.unwrap_or(10.0 * power)
}

#[cfg(test)]
mod tests {
    use super::Scale;

    #[test]
    fn ticks_are_round_and_cover_the_largest() {
        assert_eq!(Scale::linear(93.0, 4, (0.0, 1.0)).ticks, [0.0, 25.0, 50.0, 75.0, 100.0]);
        assert_eq!(Scale::linear(100.0, 4, (0.0, 1.0)).ticks, [0.0, 25.0, 50.0, 75.0, 100.0]);
        assert_eq!(Scale::linear(0.35, 4, (0.0, 1.0)).ticks.len(), 5);
        for largest in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert_eq!(Scale::linear(largest, 2, (0.0, 1.0)).ticks, [0.0, 0.5, 1.0], "{largest}");
        }
        for i in 1..2000 {
            let largest = f64::from(i) * 0.37;
            let scale = Scale::linear(largest, 4, (0.0, 1.0));
            assert!(
                scale.high >= largest * (1.0 - 1e-6) && (2..=6).contains(&scale.ticks.len()),
                "{largest}: {scale:?}"
            );
        }
    }

    #[test]
    fn figures_land_between_the_ends() {
        let scale = Scale::linear(10.0, 5, (100.0, 0.0));
        assert_eq!([0.0, 5.0, 10.0, 99.0, -3.0, f64::NAN].map(|n| scale.at(n)), [100.0, 50.0, 0.0, 0.0, 100.0, 100.0]);
        let scale = Scale::logarithmic([0.0, 2.0, 150.0, f64::NAN].into_iter(), (0.0, 300.0));
        assert_eq!(scale.ticks, [1.0, 10.0, 100.0, 1000.0]);
        assert_eq!([1.0, 10.0, 1000.0, 0.0].map(|n| scale.at(n).round()), [0.0, 100.0, 300.0, 0.0]);
        assert_eq!(Scale::logarithmic(std::iter::empty(), (0.0, 1.0)).ticks, [1.0, 10.0]);
        assert_eq!(Scale::logarithmic([10.0].into_iter(), (0.0, 1.0)).ticks, [10.0, 100.0]);
    }
}
