//! The prefix tree: which token sequences have their keys and values in pages.
//!
//! A node is one page of 64 tokens below its parent's, so a path from a root spells a sequence.
//!
//! Invariants: a node has a page of each group that sees everything, and perhaps one of the others;
//! a node with users has users on its whole path; a node was never used later than its parent. So
//! nodes without users, sorted by last use and then deepest first, can be removed in that order.

use std::collections::BTreeMap;

use kie_kernels::abi::PAGE;

/// Index of a node.
pub(super) type Id = u32;

type Children = BTreeMap<[u32; PAGE], Id>;

/// One page of a cached sequence.
#[derive(Debug)]
pub(super) struct Node {
    parent: Option<Id>,
    tokens: [u32; PAGE],
    children: Children,
    /// Pages from the root: 0 for the first.
    pub(super) depth: usize,
    /// Physical page in each group.
    pub(super) pages: Box<[Option<u32>]>,
    /// Leases whose path holds the node.
    pub(super) users: u32,
    last_use: u64,
}

/// A forest, one root for each first page.
#[derive(Debug, Default)]
pub(super) struct Tree {
    nodes: Vec<Option<Node>>,
    vacant: Vec<Id>,
    roots: Children,
    clock: u64,
}

impl Tree {
    pub(super) fn node(&self, id: Id) -> &Node {
        self.nodes[id as usize].as_ref().expect("ids in paths are held by users")
    }

    pub(super) fn node_mut(&mut self, id: Id) -> &mut Node {
        self.nodes[id as usize].as_mut().expect("ids in paths are held by users")
    }

    /// All nodes, in order of their index.
    pub(super) fn iter(&self) -> impl Iterator<Item = (Id, &Node)> {
        (0..).zip(&self.nodes).filter_map(|(id, n)| n.as_ref().map(|n| (id, n)))
    }

    fn children(&self, parent: Option<Id>) -> &Children {
        parent.map_or(&self.roots, |p| &self.node(p).children)
    }

    fn children_mut(&mut self, parent: Option<Id>) -> &mut Children {
        match parent {
            Some(p) => &mut self.node_mut(p).children,
            None => &mut self.roots,
        }
    }

    /// The child of `parent` that continues with `tokens`.
    pub(super) fn child(&self, parent: Option<Id>, tokens: &[u32; PAGE]) -> Option<Id> {
        self.children(parent).get(tokens).copied()
    }

    /// The nodes that spell the whole pages of `tokens`, as far as they exist.
    pub(super) fn path(&self, tokens: &[u32]) -> Vec<Id> {
        let mut path: Vec<Id> = Vec::new();
        for page in tokens.as_chunks::<PAGE>().0 {
            match self.child(path.last().copied(), page) {
                Some(id) => path.push(id),
                None => break,
            }
        }
        path
    }

    /// A new node without users.
    pub(super) fn insert(
        &mut self,
        parent: Option<Id>,
        tokens: &[u32; PAGE],
        pages: Box<[Option<u32>]>,
    ) -> Id {
        let node = Node {
            parent,
            tokens: *tokens,
            children: Children::new(),
            depth: parent.map_or(0, |p| self.node(p).depth + 1),
            pages,
            users: 0,
            last_use: self.clock,
        };
        let id = self.vacant.pop().unwrap_or(self.nodes.len() as Id);
        if id as usize == self.nodes.len() {
            self.nodes.push(None);
        }
        self.nodes[id as usize] = Some(node);
        self.children_mut(parent).insert(*tokens, id);
        id
    }

    /// Takes a leaf out.
    pub(super) fn remove(&mut self, id: Id) -> Node {
        let node = self.nodes[id as usize].take().expect("removed once");
        assert!(node.children.is_empty() && node.users == 0, "only unused leaves are removed");
        self.children_mut(node.parent).remove(&node.tokens);
        self.vacant.push(id);
        node
    }

    /// Marks a path, from its root, as used now.
    pub(super) fn touch(&mut self, path: &[Id]) {
        self.clock += 1;
        for &id in path {
            self.node_mut(id).last_use = self.clock;
        }
    }

    /// Nodes in the order in which they are given up: least recently used first, deepest first.
    pub(super) fn by_age(&self) -> Vec<Id> {
        let mut ids: Vec<Id> = self.iter().map(|(id, _)| id).collect();
        ids.sort_unstable_by_key(|&id| {
            let n = self.node(id);
            (n.last_use, std::cmp::Reverse(n.depth), id)
        });
        ids
    }

    /// For each node index: pages down to the nearest end of a path (0 for a leaf).
    pub(super) fn distance_to_end(&self) -> Vec<usize> {
        let mut ids: Vec<Id> = self.iter().map(|(id, _)| id).collect();
        ids.sort_unstable_by_key(|&id| std::cmp::Reverse(self.node(id).depth));
        let mut distance = vec![0; self.nodes.len()];
        for id in ids {
            let below = self.node(id).children.values().map(|&c| distance[c as usize] + 1).min();
            distance[id as usize] = below.unwrap_or(0);
        }
        distance
    }

    /// The invariants of the module, for tests.
    pub(super) fn check(&self) -> Result<(), String> {
        for (id, n) in self.iter() {
            if self.child(n.parent, &n.tokens) != Some(id) {
                return Err(format!("node {id} is not its parent's child"));
            }
            if let Some(p) = n.parent.map(|p| self.node(p)) {
                if p.depth + 1 != n.depth || p.users < n.users || p.last_use < n.last_use {
                    return Err(format!("node {id} outranks its parent"));
                }
            }
        }
        Ok(())
    }
}
