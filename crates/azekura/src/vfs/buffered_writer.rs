//! Writing a file front to back, in large pieces.

use std::sync::Arc;

use crate::base::Result;
use crate::vfs::File;

/// The file is written in pieces of at least this many bytes.
const WRITE_LEN: usize = 256 << 10;

/// The end of a file that grows. One thread at a time; the caller syncs.
pub(crate) struct BufferedFileWriter {
    file: Arc<dyn File>,
    /// What the file does not have yet, and where it goes.
    buffer: Vec<u8>,
    written: u64,
}

impl BufferedFileWriter {
    /// Of an empty file that begins with `head`.
    pub(crate) fn new(file: Arc<dyn File>, head: &[u8]) -> BufferedFileWriter {
        BufferedFileWriter { file, buffer: head.to_vec(), written: 0 }
    }

    /// The length of the file with what waits to be written.
    pub(crate) fn offset(&self) -> u64 {
        self.written + self.buffer.len() as u64
    }

    /// Lets `append` put bytes at the end, and writes once enough have come together.
    ///
    /// # Errors
    /// `Io` and `OutOfSpace` of the file, which is then of no use.
    pub(crate) fn append_with<R>(&mut self, append: impl FnOnce(&mut Vec<u8>, u64) -> R) -> Result<R> {
        let offset = self.offset();
        let result = append(&mut self.buffer, offset);
        if self.buffer.len() >= WRITE_LEN {
            self.flush()?;
        }
        Ok(result)
    }

    /// Writes what waits; returns the length of the file.
    ///
    /// # Errors
    /// As for [`put`](BufferedFileWriter::append_with).
    pub(crate) fn finish(mut self) -> Result<u64> {
        self.flush()?;
        Ok(self.written)
    }

    fn flush(&mut self) -> Result<()> {
        self.file.write_at(&self.buffer, self.written)?;
        self.written += self.buffer.len() as u64;
        self.buffer.clear();
        self.buffer.shrink_to(2 * WRITE_LEN);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::vfs::mem::MemFs;
    use crate::vfs::{Fs, OpenMode};

    #[test]
    fn appends_reach_the_file_in_order() {
        let fs = MemFs::new();
        fs.create_dir_all(Path::new("/d")).unwrap();
        let file = fs.open(Path::new("/d/f"), OpenMode::Create).unwrap();
        let mut appender = BufferedFileWriter::new(Arc::clone(&file), b"head");
        let mut wanted = b"head".to_vec();
        for round in 0..200u8 {
            let piece = vec![round; 7_001];
            let at = appender.append_with(|out, offset| {
                out.extend_from_slice(&piece);
                offset
            });
            assert_eq!(at.unwrap(), wanted.len() as u64);
            wanted.extend_from_slice(&piece);
            assert_eq!(appender.offset(), wanted.len() as u64);
        }
        assert_eq!(appender.finish().unwrap(), wanted.len() as u64);
        let mut found = vec![0; wanted.len()];
        file.read_exact_at(&mut found, 0).unwrap();
        assert!(found == wanted);
    }
}
