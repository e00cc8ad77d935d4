//! Progress bars on standard error; never with `--json`, never where nobody looks.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// A bar, or nothing.
#[derive(Debug)]
pub(crate) struct Progress(ProgressBar);

impl Progress {
    /// A bar over `total` bytes.
    pub(crate) fn bytes(json: bool, total: u64, label: &'static str) -> Progress {
        Progress::new(
            json,
            Some(total),
            label,
            "{prefix:>12} [{bar:30}] {bytes} of {total_bytes}, {bytes_per_sec}  {msg}",
        )
    }

    /// A bar over `total` entries; more than `total` may come.
    pub(crate) fn entries(json: bool, total: u64, label: &'static str) -> Progress {
        Progress::new(json, Some(total), label, "{prefix:>12} [{bar:30}] {human_pos} of {human_len} entries  {msg}")
    }

    /// A spinner that counts entries.
    pub(crate) fn spinner(json: bool, label: &'static str) -> Progress {
        let progress = Progress::new(json, None, label, "{prefix:>12} {spinner} {human_pos} entries  {msg}");
        progress.0.enable_steady_tick(Duration::from_millis(100));
        progress
    }

    fn new(json: bool, total: Option<u64>, label: &'static str, template: &str) -> Progress {
        // A bar on standard error hides itself where that is not a terminal.
        let target = if json { ProgressDrawTarget::hidden() } else { ProgressDrawTarget::stderr() };
        let style = ProgressStyle::with_template(template).expect("the templates above are well formed");
        let bar =
            ProgressBar::with_draw_target(total, target).with_style(style.progress_chars("█▌ ")).with_prefix(label);
        Progress(bar)
    }

    /// The same bar with `done` behind it already, which does not count for the speed.
    pub(crate) fn from(self, done: u64) -> Progress {
        self.0.set_position(done);
        self.0.reset_eta();
        self
    }

    pub(crate) fn add(&self, n: u64) {
        self.0.inc(n);
    }

    pub(crate) fn set(&self, position: u64, total: u64) {
        self.0.set_length(total);
        self.0.set_position(position);
    }

    pub(crate) fn message(&self, message: impl Into<String>) {
        self.0.set_message(message.into());
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
