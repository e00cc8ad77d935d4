//! Standard output: text or JSON, buffered. A closed pipe ends the command without an error message.

use std::fmt::Display;
use std::io::{self, BufWriter, IsTerminal, StdoutLock, Write};

use serde_json::{Value, json};

use crate::error::{CliError, Result};

/// Destination of a command's results.
#[derive(Debug)]
pub(crate) struct CommandOutput {
    out: BufWriter<StdoutLock<'static>>,
    json: bool,
}

impl CommandOutput {
    pub(crate) fn new(json: bool) -> CommandOutput {
        CommandOutput { out: BufWriter::with_capacity(64 << 10, io::stdout().lock()), json }
    }

    /// Whether results are printed as JSON.
    pub(crate) fn json(&self) -> bool {
        self.json
    }

    /// Whether standard output is a terminal.
    pub(crate) fn is_terminal(&self) -> bool {
        self.out.get_ref().is_terminal()
    }

    /// Writes one line of text or JSON.
    pub(crate) fn line(&mut self, line: impl Display) -> Result<()> {
        writeln!(self.out, "{line}").map_err(write_error)
    }

    /// Writes `json` with `--json`, else `text`.
    pub(crate) fn json_or_text(&mut self, json: Value, text: impl Display) -> Result<()> {
        if self.json { self.line(json) } else { self.line(text) }
    }

    /// Writes all `items` as one object under "partitions", or as text with an empty line between two.
    pub(crate) fn partitions<T>(
        &mut self,
        items: &[T],
        to_json: impl Fn(&T) -> Value,
        print: impl Fn(&T, &mut CommandOutput) -> Result<()>,
    ) -> Result<()> {
        if self.json {
            return self.line(json!({ "partitions": items.iter().map(to_json).collect::<Vec<_>>() }));
        }
        for (i, item) in items.iter().enumerate() {
            if i > 0 {
                self.line("")?;
            }
            print(item, self)?;
        }
        Ok(())
    }

    /// Writes lines about errors, indented. Without `all`, writes the first [`ERROR_LINES`] and how to see the others.
    pub(crate) fn error_lines(&mut self, lines: &[String], all: bool) -> Result<()> {
        let (shown, hint) = capped(lines, all);
        shown.iter().map(String::as_str).chain(hint.as_deref()).try_for_each(|line| self.line(format_args!("  {line}")))
    }

    /// Writes bytes unchanged.
    pub(crate) fn write_bytes(&mut self, bytes: &[u8]) -> Result<()> {
        self.out.write_all(bytes).map_err(write_error)
    }

    /// The destination of bytes that another writer formats. [`write_error`] explains its errors.
    pub(crate) fn writer(&mut self) -> &mut dyn Write {
        &mut self.out
    }

    /// Flushes the buffer.
    pub(crate) fn finish(&mut self) -> Result<()> {
        self.out.flush().map_err(write_error)
    }
}

/// Number of lines of a list of errors that are shown without `--all-errors`.
const ERROR_LINES: usize = 20;

/// The lines of a list of errors to show, and a last line if others are not shown.
pub(crate) fn capped(lines: &[String], all: bool) -> (&[String], Option<String>) {
    match lines.split_at_checked(ERROR_LINES) {
        Some((shown, hidden)) if !all && !hidden.is_empty() => {
            (shown, Some(format!("… and {} more; --all-errors lists them", hidden.len())))
        }
        _ => (lines, None),
    }
}

/// An error of standard output; a closed pipe ends the command without a message.
pub(crate) fn write_error(error: io::Error) -> CliError {
    match error.kind() {
        io::ErrorKind::BrokenPipe => CliError::pipe_closed(),
        _ => CliError::os("write the result", "standard output", error),
    }
}
