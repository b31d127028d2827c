// The page: its sections in order, and the links to them.

const SECTIONS = [
  summarySection,
  compareSection,
  clusterSection,
  breakdownSection,
  timelineSection,
  treeSection,
  memorySection,
  collectivesSection,
  arraysSection,
  searchSection,
];

(function show() {
  const main = document.getElementById("main");
  const nodes = SECTIONS.map((build) => build()).filter(Boolean);
  main.replaceChildren(...nodes);
  document
    .getElementById("nav")
    .append(...nodes.map((node) => make("a", { href: `#${node.id}` }, node.getAttribute("aria-label"))));
  themeChanged();
  document.documentElement.dataset.ready = "yes";
})();
