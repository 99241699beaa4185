//! What an instance of a component takes of the pool, counted from the binary alone.
//!
//! Definitions are not instances: a module that is instantiated twice is counted twice, one that
//! never is not at all. A few bytes can ask for an exponential number of instances, hence the
//! saturating sums.

use wasmparser::{ComponentAlias, ComponentInstance, ComponentOuterAliasKind, Instance};

/// Pages of WebAssembly, unless a memory says otherwise.
const PAGE_BYTES: u64 = 1 << 16;

/// Linear memories, tables and instances, summed over everything that is instantiated.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Needs {
    pub(super) memories: u64,
    /// Memories of the module that has most.
    pub(super) memories_of_module: u64,
    /// Bytes that all memories have at the start.
    pub(super) memory_bytes: u64,
    pub(super) tables: u64,
    /// Tables of the module that has most.
    pub(super) tables_of_module: u64,
    /// Elements of the largest table at the start.
    pub(super) table_elements: u64,
    pub(super) core_instances: u64,
}

impl Needs {
    fn add(&mut self, other: Self) {
        self.memories = self.memories.saturating_add(other.memories);
        self.memory_bytes = self.memory_bytes.saturating_add(other.memory_bytes);
        self.memories_of_module = self.memories_of_module.max(other.memories_of_module);
        self.tables_of_module = self.tables_of_module.max(other.tables_of_module);
        self.tables = self.tables.saturating_add(other.tables);
        self.table_elements = self.table_elements.max(other.table_elements);
        self.core_instances = self.core_instances.saturating_add(other.core_instances);
    }

    pub(super) fn add_memory(&mut self, memory: &wasmparser::MemoryType) {
        let page = memory
            .page_size_log2
            .map_or(PAGE_BYTES, |log2| 1u64.checked_shl(log2).unwrap_or(PAGE_BYTES));
        let bytes = memory.initial.saturating_mul(page);
        self.memories = self.memories.saturating_add(1);
        self.memory_bytes = self.memory_bytes.saturating_add(bytes);
        self.memories_of_module = self.memories_of_module.saturating_add(1);
    }

    pub(super) fn add_table(&mut self, table: &wasmparser::TableType) {
        self.tables = self.tables.saturating_add(1);
        self.tables_of_module = self.tables_of_module.saturating_add(1);
        self.table_elements = self.table_elements.max(table.initial);
    }
}

/// The index spaces of a component that are needed to follow an instantiation. What comes from
/// outside is unknown and counts as nothing: a handler is given no modules.
#[derive(Debug, Default)]
pub(super) struct Scope {
    modules: Vec<Needs>,
    components: Vec<Needs>,
    needs: Needs,
}

/// Components around the one that is read, the innermost last.
#[derive(Debug, Default)]
pub(super) struct Scopes {
    stack: Vec<Scope>,
}

impl Scopes {
    pub(super) fn enter(&mut self) {
        self.stack.push(Scope::default());
    }

    /// The end of a component. The outermost one's needs are the answer.
    pub(super) fn leave(&mut self) -> Needs {
        let needs = self.stack.pop().map(|scope| scope.needs).unwrap_or_default();
        if let Some(scope) = self.stack.last_mut() {
            scope.components.push(needs);
        }
        needs
    }

    pub(super) fn depth(&self) -> usize {
        self.stack.len()
    }

    pub(super) fn define_module(&mut self, needs: Needs) {
        if let Some(scope) = self.stack.last_mut() {
            scope.modules.push(Needs { core_instances: 1, ..needs });
        }
    }

    pub(super) fn import_module(&mut self) {
        self.define_module(Needs::default());
    }

    pub(super) fn import_component(&mut self) {
        if let Some(scope) = self.stack.last_mut() {
            scope.components.push(Needs::default());
        }
    }

    pub(super) fn instantiate_module(&mut self, instance: &Instance<'_>) {
        if let (Instance::Instantiate { module_index, .. }, Some(scope)) =
            (instance, self.stack.last_mut())
        {
            scope.needs.add(scope.modules.get(*module_index as usize).copied().unwrap_or_default());
        }
    }

    pub(super) fn instantiate_component(&mut self, instance: &ComponentInstance<'_>) {
        if let (ComponentInstance::Instantiate { component_index, .. }, Some(scope)) =
            (instance, self.stack.last_mut())
        {
            scope
                .needs
                .add(scope.components.get(*component_index as usize).copied().unwrap_or_default());
        }
    }

    pub(super) fn alias(&mut self, alias: &ComponentAlias<'_>) {
        use wasmparser::ComponentExternalKind::{Component, Module};
        match alias {
            ComponentAlias::InstanceExport { kind: Module, .. } => self.import_module(),
            ComponentAlias::InstanceExport { kind: Component, .. } => self.import_component(),
            ComponentAlias::Outer { kind, count, index } => {
                self.alias_outer(*kind, *count as usize, *index as usize)
            }
            ComponentAlias::InstanceExport { .. } | ComponentAlias::CoreInstanceExport { .. } => {}
        }
    }

    fn alias_outer(&mut self, kind: ComponentOuterAliasKind, count: usize, index: usize) {
        let outer = self.stack.iter().nth_back(count);
        let found = match kind {
            ComponentOuterAliasKind::CoreModule => outer.and_then(|scope| scope.modules.get(index)),
            ComponentOuterAliasKind::Component => {
                outer.and_then(|scope| scope.components.get(index))
            }
            ComponentOuterAliasKind::CoreType | ComponentOuterAliasKind::Type => return,
        };
        let needs = found.copied().unwrap_or_default();
        if let Some(scope) = self.stack.last_mut() {
            let space = if matches!(kind, ComponentOuterAliasKind::CoreModule) {
                &mut scope.modules
            } else {
                &mut scope.components
            };
            space.push(needs);
        }
    }

    /// An export makes a new index of what it exports.
    pub(super) fn export(&mut self, export: &wasmparser::ComponentExport<'_>) {
        use wasmparser::ComponentExternalKind::{Component, Module};
        let Some(scope) = self.stack.last_mut() else { return };
        let space = match export.kind {
            Module => &mut scope.modules,
            Component => &mut scope.components,
            _ => return,
        };
        let needs = space.get(export.index as usize).copied().unwrap_or_default();
        space.push(needs);
    }
}
