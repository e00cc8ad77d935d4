//! Writes a file sequentially, in large chunks.

use std::sync::Arc;

use crate::base::Result;
use crate::vfs::File;

/// Minimum length of a write in bytes, except for the last one.
const WRITE_LEN: usize = 256 << 10;

/// Appends to a growing file. Used by one thread at a time. The caller syncs the file.
pub(crate) struct BufferedFileWriter {
    file: Arc<dyn File>,
    /// Bytes that are not yet written. They belong at offset `written` of the file.
    buffer: Vec<u8>,
    written: u64,
}

impl BufferedFileWriter {
    /// Creates a writer for the empty `file`, which will begin with `head`.
    pub(crate) fn new(file: Arc<dyn File>, head: &[u8]) -> BufferedFileWriter {
        BufferedFileWriter { file, buffer: head.to_vec(), written: 0 }
    }

    /// Length of the file in bytes, including buffered bytes.
    pub(crate) fn offset(&self) -> u64 {
        self.written + self.buffer.len() as u64
    }

    /// Calls `append` with the buffer, to which it may append bytes, and with the file offset of these bytes. Writes
    /// the buffer once it has at least [`WRITE_LEN`] bytes.
    ///
    /// # Errors
    /// `Io` and `OutOfSpace` of the file. The file is unusable after an error.
    pub(crate) fn append_with<R>(&mut self, append: impl FnOnce(&mut Vec<u8>, u64) -> R) -> Result<R> {
        let offset = self.offset();
        let result = append(&mut self.buffer, offset);
        debug_assert!(self.offset() >= offset, "a caller only appends");
        if self.buffer.len() >= WRITE_LEN {
            self.flush()?;
        }
        Ok(result)
    }

    /// Writes the buffered bytes. Returns the length of the file in bytes.
    ///
    /// # Errors
    /// As for [`append_with`](BufferedFileWriter::append_with).
    pub(crate) fn finish(mut self) -> Result<u64> {
        self.flush()?;
        debug_assert!(self.buffer.is_empty(), "all bytes are written");
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
    use crate::testing::MemFs;
    use crate::vfs::{Fs, OpenMode};

    #[test]
    fn appends_reach_the_file_in_order() {
        let fs = MemFs::new();
        fs.create_dir_all(Path::new("/d")).unwrap();
        let file = fs.open(Path::new("/d/f"), OpenMode::Create).unwrap();
        let mut appender = BufferedFileWriter::new(Arc::clone(&file), b"head");
        let mut wanted = b"head".to_vec();
        for round in 0..200u8 {
            let chunk = vec![round; 7_001];
            let at = appender.append_with(|out, offset| {
                out.extend_from_slice(&chunk);
                offset
            });
            assert_eq!(at.unwrap(), wanted.len() as u64);
            wanted.extend_from_slice(&chunk);
            assert_eq!(appender.offset(), wanted.len() as u64);
        }
        assert_eq!(appender.finish().unwrap(), wanted.len() as u64);
        let mut found = vec![0; wanted.len()];
        file.read_exact_at(&mut found, 0).unwrap();
        assert!(found == wanted);
    }
}
