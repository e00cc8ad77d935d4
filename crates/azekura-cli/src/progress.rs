//! Progress bars on standard error. Hidden with `--json` and where standard error is not a terminal.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// A progress bar or a spinner.
#[derive(Debug)]
pub(crate) struct ProgressReporter(ProgressBar);

impl ProgressReporter {
    /// A bar over `total` bytes.
    pub(crate) fn bytes(json: bool, total: u64, label: &'static str) -> ProgressReporter {
        const TEMPLATE: &str = "{prefix:>12} [{bar:30}] {bytes} of {total_bytes}, {bytes_per_sec}  {msg}";
        ProgressReporter::new(json, Some(total), label, TEMPLATE)
    }

    /// A bar over about `total` entries.
    pub(crate) fn entries(json: bool, total: u64, label: &'static str) -> ProgressReporter {
        const TEMPLATE: &str = "{prefix:>12} [{bar:30}] {human_pos} of {human_len} entries  {msg}";
        ProgressReporter::new(json, Some(total), label, TEMPLATE)
    }

    /// A spinner that counts entries.
    pub(crate) fn spinner(json: bool, label: &'static str) -> ProgressReporter {
        let progress = ProgressReporter::new(json, None, label, "{prefix:>12} {spinner} {human_pos} entries  {msg}");
        progress.0.enable_steady_tick(Duration::from_millis(100));
        progress
    }

    fn new(json: bool, total: Option<u64>, label: &'static str, template: &str) -> ProgressReporter {
        // indicatif hides a bar on standard error if that is not a terminal.
        let target = if json { ProgressDrawTarget::hidden() } else { ProgressDrawTarget::stderr() };
        let style = ProgressStyle::with_template(template).expect("the templates above are valid");
        let bar = ProgressBar::with_draw_target(total, target);
        ProgressReporter(bar.with_style(style.progress_chars("█▌ ")).with_prefix(label))
    }

    pub(crate) fn add(&self, n: u64) {
        self.0.inc(n);
    }

    /// Sets the position, unless it is there or beyond.
    pub(crate) fn at_least(&self, position: u64) {
        self.0.inc(position.saturating_sub(self.0.position()));
    }

    pub(crate) fn set(&self, position: u64, total: u64) {
        self.0.set_length(total);
        self.0.set_position(position);
    }

    pub(crate) fn message(&self, message: impl Into<String>) {
        self.0.set_message(message.into());
    }
}

impl Drop for ProgressReporter {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
