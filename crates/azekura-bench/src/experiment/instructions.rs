//! Instructions of this thread in user mode, counted by the processor where it and the system allow that.

use perf_event::{Builder, Counter};

/// Counts while it is asked to; counts nothing where that is not allowed.
pub(crate) struct Instructions(Option<Counter>);

impl Instructions {
    /// A counter of this thread.
    pub(crate) fn new() -> Instructions {
        Instructions(Builder::new().build().ok())
    }

    /// The answer of `act`, and how many instructions it took.
    pub(crate) fn of<T>(&mut self, act: impl FnOnce() -> T) -> (T, Option<u64>) {
        let begun = self.0.as_mut().is_some_and(|counter| counter.reset().and_then(|()| counter.enable()).is_ok());
        let answer = act();
        let count = self.0.as_mut().filter(|_| begun).and_then(|counter| {
            counter.disable().ok()?;
            counter.read().ok()
        });
        // A machine that offers the counter and counts nothing has none.
        (answer, count.filter(|count| *count > 0))
    }
}

#[cfg(test)]
mod tests {
    use super::Instructions;

    #[test]
    fn more_work_is_more_instructions_or_nothing_is_counted() {
        let mut counter = Instructions::new();
        let work = |n: u64| (0..n).fold(1u64, |x, i| std::hint::black_box(x.wrapping_mul(i | 1)));
        let (_, few) = counter.of(|| work(1000));
        let (_, many) = counter.of(|| work(1_000_000));
        assert_eq!(few.is_some(), many.is_some());
        if let (Some(few), Some(many)) = (few, many) {
            assert!(few >= 1000 && many > 10 * few, "{few} {many}");
        }
    }
}
