from mpidl.comm.world import World as World
