//! Partitions whose keys have a [`TestOrder`].

use std::sync::Arc;

use azekura::testing::{TestComparator, TestOrder};
use azekura::{
    DataBlockIndexType, Database, ErrorKind, MergeOperator, Partition, PartitionComponents, PartitionCreateOptions,
    PrefixExtractor, Result,
};

/// The options without those that `order` refuses: if equal keys cannot be hashed, no block layout with hashes;
/// unless the order is that of bytes, no prefix extractor.
pub(crate) fn supported_options(order: TestOrder, options: PartitionCreateOptions) -> PartitionCreateOptions {
    match order {
        TestOrder::Bytes => options,
        TestOrder::AnyCase | TestOrder::ReversedAnyCase => {
            options.prefix_extractor(None::<PrefixExtractor>).data_block_index_type(DataBlockIndexType::BinarySearch)
        }
        _ => options.prefix_extractor(None::<PrefixExtractor>),
    }
}

/// Opens or creates a partition whose keys have this order.
///
/// # Errors
/// Those of opening.
pub(crate) fn open_ordered(
    order: TestOrder,
    db: &Database,
    name: &str,
    options: PartitionCreateOptions,
    operator: Option<Arc<dyn MergeOperator>>,
) -> Result<Partition> {
    let part = open_stored(order, db, name, options.clone(), operator)?;
    // Also sets the options of tests, which are not stored. They are valid, so the call is if the database is open
    // for writing.
    let changed = part.set_options(supported_options(order, options));
    changed.or_else(|error| if error.kind() == ErrorKind::Invalid { Ok(()) } else { Err(error) })?;
    Ok(part)
}

/// Opens a partition with its stored options, or creates it with `options`.
pub(crate) fn open_stored(
    order: TestOrder,
    db: &Database,
    name: &str,
    options: PartitionCreateOptions,
    operator: Option<Arc<dyn MergeOperator>>,
) -> Result<Partition> {
    let mut components = PartitionComponents::default();
    if let Some(comparator) = order.comparator() {
        components = components.comparator(comparator);
    }
    if let Some(operator) = operator {
        components = components.merge_operator(operator);
    }
    db.open_partition_with(name, supported_options(order, options), components)
}

/// Opens a partition in the order of bytes, with a comparator that counts comparisons: a measure of work that does not
/// depend on time.
pub(crate) fn open_counting(
    db: &Database,
    name: &str,
    options: PartitionCreateOptions,
) -> (Partition, Arc<TestComparator>) {
    let order = Arc::new(TestComparator::new(TestOrder::Bytes).named("counting"));
    (db.open_partition_with_comparator(name, options, order.clone()).unwrap(), order)
}
