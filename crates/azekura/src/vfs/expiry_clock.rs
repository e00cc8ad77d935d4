//! The clock of expiry times.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::vfs::env::Env;

/// The wall clock of an environment, which never goes back here: it returns the highest time that any caller has seen.
/// Thread safe. Without an environment it always returns 0, and nothing expires.
#[derive(Default)]
pub(crate) struct ExpiryClock {
    env: Option<Arc<dyn Env>>,
    highest_ms: AtomicU64,
}

impl ExpiryClock {
    pub(crate) fn new(env: Arc<dyn Env>) -> ExpiryClock {
        ExpiryClock { env: Some(env), highest_ms: AtomicU64::new(1) }
    }

    pub(crate) fn env(&self) -> Option<&Arc<dyn Env>> {
        self.env.as_ref()
    }

    /// The time in milliseconds since 1970. At least 1, because 0 stands for a reader without a time.
    pub(crate) fn now_ms(&self) -> u64 {
        let Some(env) = &self.env else { return 0 };
        let (now, highest) = (env.now_ms(), self.highest_ms.load(Ordering::SeqCst));
        debug_assert!(highest > 0, "0 stands for a reader without a time");
        if now <= highest { highest } else { self.highest_ms.fetch_max(now, Ordering::SeqCst).max(now) }
    }
}

impl std::fmt::Debug for ExpiryClock {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ExpiryClock").field("highest_ms", &self.highest_ms).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::testing::TestEnv;

    #[test]
    fn time_never_goes_back() {
        let env = TestEnv::new(1);
        let clock = ExpiryClock::new(Arc::new(env.clone()));
        let start = clock.now_ms();
        env.advance(Duration::from_secs(5));
        assert_eq!(clock.now_ms(), start + 5_000);
        env.jump_wall_clock(-3_000);
        assert_eq!(clock.now_ms(), start + 5_000);
        env.advance(Duration::from_secs(4));
        assert_eq!(clock.now_ms(), start + 6_000);
        env.jump_wall_clock(i64::MIN / 2);
        assert_eq!((clock.now_ms(), ExpiryClock::default().now_ms()), (start + 6_000, 0));
    }
}
