//! The data blocks of a database, for measuring lookups in them.

use std::hint::black_box;
use std::path::Path;
use std::sync::Arc;

use crate::base::comparator::BYTEWISE_NAME;
use crate::base::{Error, InternalKey, KeyOrder, Result};
use crate::block::block::Block;
use crate::block::cache::BlockCache;
use crate::block::frame::BlockKind;
use crate::block::iter::BlockIter;
use crate::inspect::report::read_manifest_state;
use crate::table::index::IndexIter;
use crate::table::options::TableReadOptions;
use crate::table::reader::TableReader;
use crate::vfs::Fs;
use crate::vfs::open_files::{DataFiles, FileAccess};

/// Capacity in bytes of a cache that allocates its blocks on huge pages, as the caches of most databases do.
const HUGE_PAGE_CACHE_SIZE: u64 = 1 << 40;

/// The data blocks of all tables of a database, in memory, without indexes and caches, so that the cost of a lookup
/// inside a block can be measured separately from the cost of finding the block. Thread safe.
#[doc(hidden)]
pub struct DataBlocks {
    blocks: Vec<Arc<Block>>,
    order: KeyOrder,
}

/// A block, and the hash of a key in it, which a lookup has computed before it reads the block.
#[doc(hidden)]
#[derive(Clone, Copy, Debug)]
pub struct DataBlockPosition {
    block: usize,
    hash: Option<u64>,
}

impl DataBlocks {
    /// Reads all blocks from their files, without a cache. Calls `entry` with the position and the key of each entry.
    ///
    /// # Errors
    /// `Io` or `Corruption` from the files, `Unsupported` if a partition has a custom comparator.
    pub fn read(fs: &Arc<dyn Fs>, dir: &Path, entry: &mut dyn FnMut(DataBlockPosition, &[u8])) -> Result<DataBlocks> {
        let dir = &*fs.absolute(dir)?;
        let manifest_state = read_manifest_state(fs, dir)?.0;
        let files = DataFiles::tables(Arc::clone(fs), dir, 8, FileAccess::buffered());
        let cache = Arc::new(BlockCache::new(HUGE_PAGE_CACHE_SIZE));
        let options =
            TableReadOptions { cache_index_and_filter_blocks: true, pin_top_level: false, pin_partitions: false };
        let mut read = DataBlocks { blocks: Vec::new(), order: KeyOrder::bytewise() };
        for partition in manifest_state.partitions.values() {
            if partition.meta.comparator != BYTEWISE_NAME {
                let (name, comparator) = (&partition.meta.name, &partition.meta.comparator);
                let message =
                    format!("partition {name:?} has the comparator {comparator:?}, which is not available here");
                return Err(Error::unsupported(message));
            }
            for (_, meta) in partition.tables.values() {
                let cache = Arc::clone(&cache);
                let table =
                    TableReader::open(&files, cache, meta, read.order.clone(), manifest_state.hash_seed, options)?;
                read.add_table(&table, entry).map_err(|error| error.in_file(table.fetcher.path()))?;
            }
        }
        Ok(read)
    }

    fn add_table(&mut self, table: &TableReader, entry: &mut dyn FnMut(DataBlockPosition, &[u8])) -> Result<()> {
        let mut index = IndexIter::new(false);
        index.seek_to_first(&table.index, &table.fetcher)?;
        while let Some((handle, ..)) = index.entry()? {
            let block: Arc<Block> = table.fetcher.read_block(handle, BlockKind::Data)?;
            let mut iter = BlockIter::new(Arc::clone(&block));
            iter.seek_to_first()?;
            while iter.valid() {
                let key = iter.key().user_key;
                entry(DataBlockPosition { block: self.blocks.len(), hash: table.hash_key(key) }, key);
                iter.next()?;
            }
            self.blocks.push(block);
            index.next(&table.fetcher)?;
        }
        Ok(())
    }

    /// Number of blocks.
    pub fn count(&self) -> usize {
        self.blocks.len()
    }

    /// Returns the length of the key's value, if the block contains the key. Does what a lookup does once it has the
    /// block.
    ///
    /// # Errors
    /// `Corruption` if the block is damaged.
    #[inline(never)]
    pub fn find(&self, position: DataBlockPosition, key: &[u8]) -> Result<Option<usize>> {
        let Some(block) = self.blocks.get(position.block) else { return Ok(None) };
        let found = block.lookup(InternalKey::before_versions_of(key), position.hash, &self.order)?;
        Ok(found.filter(|found| found.key_matches).map(|found| found.value.len()))
    }

    /// As [`find`](DataBlocks::find), but without a search in the block, to measure the cost of the call itself.
    /// Returns the length of the key, if there is such a block.
    ///
    /// # Errors
    /// None; the signature is that of `find`.
    #[inline(never)]
    pub fn lookup_overhead(&self, position: DataBlockPosition, key: &[u8]) -> Result<Option<usize>> {
        Ok(black_box(self.blocks.get(position.block).map(Arc::as_ptr)).map(|_| key.len()))
    }
}
