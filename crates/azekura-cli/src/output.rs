//! Standard output: text or JSON, buffered, and calm when the reader leaves.

use std::fmt::Display;
use std::io::{self, BufWriter, IsTerminal, StdoutLock, Write};

use crate::failure::{Failure, Result};

/// Where results go.
#[derive(Debug)]
pub(crate) struct Output {
    out: BufWriter<StdoutLock<'static>>,
    json: bool,
}

impl Output {
    pub(crate) fn new(json: bool) -> Output {
        Output { out: BufWriter::with_capacity(64 << 10, io::stdout().lock()), json }
    }

    /// Whether results are wanted as JSON.
    pub(crate) fn json(&self) -> bool {
        self.json
    }

    /// Whether a person is looking.
    pub(crate) fn is_terminal(&self) -> bool {
        self.out.get_ref().is_terminal()
    }

    /// One line of text or JSON.
    pub(crate) fn line(&mut self, line: impl Display) -> Result<()> {
        writeln!(self.out, "{line}").map_err(closed_or_failed)
    }

    /// Bytes as they are.
    pub(crate) fn raw(&mut self, bytes: &[u8]) -> Result<()> {
        self.out.write_all(bytes).map_err(closed_or_failed)
    }

    /// Shows what was written so far.
    pub(crate) fn finish(&mut self) -> Result<()> {
        self.out.flush().map_err(closed_or_failed)
    }
}

fn closed_or_failed(error: io::Error) -> Failure {
    match error.kind() {
        io::ErrorKind::BrokenPipe => Failure::PipeClosed,
        _ => Failure::os("write the result", "standard output", error),
    }
}
