export class Engine {
  constructor(root) {}
  set isShown(shown) {}
}
