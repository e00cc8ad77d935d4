//! Repeats work for a time, optionally with the processor's instruction counter.

use crate::error::Result;
use perf_event::Builder;
use std::time::{Duration, Instant};

/// Milliseconds since `start`, rounded to microseconds.
pub(crate) fn millis(start: Instant) -> f64 {
    (start.elapsed().as_secs_f64() * 1e6).round() / 1e3
}

/// Repetitions and the time they took.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Timed {
    pub(crate) count: u64,
    pub(crate) seconds: f64,
    /// Instructions of this thread in user mode, where the system lets a process count them.
    pub(crate) instructions: Option<u64>,
}

impl Timed {
    pub(crate) fn per_s(&self) -> f64 {
        self.count as f64 / self.seconds
    }

    /// Nanoseconds for each repetition.
    pub(crate) fn ns(&self) -> f64 {
        self.seconds * 1e9 / self.count as f64
    }

    /// Instructions for each repetition.
    pub(crate) fn instructions_each(&self) -> Option<f64> {
        self.instructions.map(|count| count as f64 / self.count as f64)
    }
}

/// Calls `act` with 0, 1, 2, … in bundles until `seconds` have passed on the clock `now`; at least one bundle.
pub(crate) fn repeat_on(
    now: impl Fn() -> f64,
    seconds: f64,
    bundle: u64,
    mut act: impl FnMut(u64) -> Result<()>,
) -> Result<Timed> {
    let mut counter = Builder::new().build().ok();
    let counting = counter.as_mut().is_some_and(|counter| counter.reset().and_then(|()| counter.enable()).is_ok());
    let start = now();
    let mut count = 0;
    while count == 0 || now() - start < seconds {
        for _ in 0..bundle {
            act(count)?;
            count += 1;
        }
    }
    let seconds = now() - start;
    let counted =
        counter.filter(|_| counting).and_then(|mut counter| counter.disable().and_then(|()| counter.read()).ok());
    // A machine that offers the counter but counts nothing has none.
    Ok(Timed { count, seconds, instructions: counted.filter(|count| *count > 0) })
}

/// The same on the clock of the wall.
pub(crate) fn repeat(seconds: f64, bundle: u64, act: impl FnMut(u64) -> Result<()>) -> Result<Timed> {
    let start = Instant::now();
    repeat_on(|| start.elapsed().as_secs_f64(), Duration::try_from_secs_f64(seconds)?.as_secs_f64(), bundle, act)
}

#[cfg(test)]
mod tests {
    use super::repeat;

    #[test]
    fn more_work_needs_more_instructions() {
        let work = |n: u64| (0..n).fold(1u64, |x, i| std::hint::black_box(x.wrapping_mul(i | 1)));
        let count = |n: u64| {
            repeat(0.0, 1, |_| {
                work(n);
                Ok(())
            })
            .unwrap()
        };
        let (few, many) = (count(1000), count(1_000_000));
        assert_eq!((few.count, few.instructions.is_some()), (1, many.instructions.is_some()));
        if let Some((few, many)) = few.instructions.zip(many.instructions) {
            assert!(few >= 1000 && many > 10 * few, "{few} {many}");
        }
    }
}
